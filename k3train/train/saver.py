"""When the loop saves, and what becomes of a save that fails."""

import time
from collections.abc import Callable
from typing import Any

from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.policies import Kind
from k3train.experiment import Experiment
from k3train.parallel import coordination, distributed
from k3train.parallel.coordination import Peers
from k3train.run.directory import RunDirectory
from k3train.run.environment import versions
from k3train.run.phases import Phases
from k3train.train.record import Moment, Recorder
from k3train.train.state import State


class Saver:
    """The checkpoints of one attempt.

    Args:
      say: a line to the user.
      main: whether this is process 0.
    """

    recorder: Recorder

    def __init__(self, exp: Experiment, folder: RunDirectory, phases: Phases, say: Callable[[str], None], main: bool):
        self._exp, self._phases, self._say, self._main = exp, phases, say, main
        self._run_id = coordination.broadcast(folder.run_id if main else None)
        self.manager = CheckpointManager(
            folder.checkpoints,
            exp.checkpoint,
            peers=Peers.of_this_run(60 * exp.checkpoint.timeout_minutes),
            run_id=self._run_id,
            note=say,
            before_commit=folder.push,
        )
        self.facts: dict[str, Any] = {}
        """What else the manifests say of the run."""
        self._notes = coordination.Notes() if distributed.process_count() > 1 else None
        self._last_time, self._save_at = time.monotonic(), 0
        self._last: int | None = None  # step of the state that was last given to the manager, or restored

    def begun(self, step: int) -> None:
        """The run goes on from ``step``."""
        self._last = step if self.manager.newest_verified == step else None
        self._last_time = time.monotonic()

    def holds(self, step: int) -> bool:
        """Whether a verified checkpoint holds the state of ``step``."""
        return step > 0 and self._last == step and self.manager.newest_verified == step

    def due(self, step: int) -> Kind | None:
        """The kind of checkpoint that is due after ``step``, the same on every process."""
        if self._notes is None or self._exp.checkpoint.every_minutes is None:
            return self.manager.should_save(step, self._last_time)
        # Clocks differ, so process 0 names a step. Having the results of step k + 1, which no process computes alone,
        # every process at step k + 2 can read what process 0 wrote after step k.
        if self._main and self._save_at <= step and self.manager.should_save(step, self._last_time) == "temporary":
            self._save_at = step + 2
            self._notes.set("save_at", str(self._save_at))
        by_steps = self.manager.should_save(step, time.monotonic())
        return by_steps or ("temporary" if self._notes.get("save_at") == str(step) else None)

    def save(self, state: State, now: Moment, kind: Kind, block: bool = False) -> None:
        """Begins a checkpoint; the metrics up to it go to the disk first, so that a resume finds none missing.

        Weights that are not finite are not saved: nothing good is ever deleted for them.

        Raises:
          SaveFailed: with ``block``: there is no checkpoint; else: as many in a row failed as are allowed.
        """
        self.recorder.flush()
        self.recorder.sync()
        if self.recorder.lost:
            return
        began = time.monotonic()
        meta = {
            "step": now.step,
            "samples": now.samples,
            "position": now.position,
            "tokens": now.tokens,
            "config": self._exp.model_dump(mode="json"),
            "seed": self._exp.run.seed,
            "versions": versions(),
            "processes": distributed.process_count(),
            "run_id": self._run_id,
            **self.facts,
        }
        with self._phases.within("save"):
            try:
                self.manager.save(now.step, state, meta, block=block, kind=kind)
            except SaveFailed as error:
                if block:
                    raise
                self._failed(error)
        self._last_time, self._last = time.monotonic(), now.step
        seconds = time.monotonic() - began
        self.recorder.pause(seconds)
        self.recorder.note(perf__save_block_s=seconds, ckpt__failures=self.manager.failures)

    def poll(self) -> None:
        """Hears of a save that failed.

        Raises:
          SaveFailed: as many in a row failed as are allowed.
        """
        try:
            self.manager.poll()
        except SaveFailed as error:
            self._failed(error)

    def _failed(self, error: SaveFailed) -> None:
        if self.manager.exhausted:
            raise error
        self._say(f"WARNING: {error}")
        self.recorder.note(ckpt__failures=self.manager.failures)

    def at_end(self, state: State, now: Moment, kind: Kind) -> bool:
        """Makes sure that the present state is saved, and waits for it; whether it is."""
        if now.step == 0 or self.recorder.lost:
            return False
        if self._last == now.step:
            try:
                with self._phases.within("save"):
                    self.manager.wait()
                return self.manager.newest_verified == now.step
            except SaveFailed as error:
                self._say(f"WARNING: {error}; trying once more")
        try:
            self.save(state, now, kind, block=True)
            return True
        except SaveFailed as error:
            self._say(f"WARNING: {error}")
            return False
