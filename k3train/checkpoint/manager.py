"""Saving and restoring a run's state: Orbax moves the arrays, the manifest makes them a checkpoint.

A save copies the arrays to the host before it returns (so the step may donate them) and goes on in a thread: Orbax
writes, process 0 hashes the files and writes the manifest, then what the keep policy no longer wants is deleted. One
save is under way at a time.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from etils.epath import Path
from orbax.checkpoint import v1 as ocp

from k3train.checkpoint import layout
from k3train.checkpoint.arrays import Table, Tree, array_table, differences, read_all, read_some, select
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused, SaveFailed
from k3train.checkpoint.manifest import read_manifest, verify_files, write_manifest


class _Save(threading.Thread):
    """The part of a save that runs beside the training."""

    def __init__(self, step: int, finish: Callable[[], None]):
        super().__init__(name=f"save-{step}")
        self.step, self.error = step, None
        self._finish = finish

    def run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # carried to the training thread by poll() or wait()
            self.error: BaseException | None = error


class CheckpointManager:
    """The checkpoints of one run.

    Args:
      directory: the run's ``checkpoints`` folder; made where absent.
      config: when to save and what to keep.
      process: this process's number; process 0 writes manifests and deletes.
      barrier: called by every process with a name, from the save's thread; returns when all have called it. It must
        therefore be a barrier of the coordination service, not a collective on devices.
      note: hears about ignored, removed and failed things, one line each.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        config: CheckpointConfig,
        *,
        process: int = 0,
        barrier: Callable[[str], None] = layout.ignore,
        note: Callable[[str], None] = print,
    ):
        self.directory = Path(directory).absolute()
        self.failures = 0
        """Saves that failed since the last that did not."""
        self._config, self._process, self._barrier, self._note = config, process, barrier, note
        self._pending: _Save | None = None
        self._verified: set[int] = set()

    # When

    def should_save(self, step: int, last_time: float) -> bool:
        """Whether the policy wants ``step`` saved; ``last_time`` is the ``time.monotonic()`` of the last save.

        With several processes only process 0's answer counts where ``every_minutes`` is set: clocks differ.
        """
        every, minutes = self._config.every, self._config.every_minutes
        by_steps = every > 0 and step > 0 and step % every == 0
        return by_steps or (minutes is not None and step > 0 and time.monotonic() - last_time >= 60 * minutes)

    # Saving

    def save(self, step: int, state: Tree, meta: Mapping[str, Any], block: bool = False) -> None:
        """Begin to save; the arrays may be donated or deleted once this returns.

        Args:
          step: optimizer steps done.
          state: nested dicts of jax arrays.
          meta: JSON to be given back by ``restore``: step, samples, tokens, config, versions.
          block: wait until the checkpoint is complete.

        Raises:
          SaveFailed: an earlier save had failed (nothing of this one is written; call again), this step exists
            already, or storage refuses.
        """
        self.wait()
        plain = json.loads(json.dumps(dict(meta), allow_nan=False))
        arrays = array_table(state)
        folder = layout.step_folder(self.directory, step)
        try:
            if self._process == 0:
                self.directory.mkdir(parents=True, exist_ok=True)
                layout.clear_way(self.directory, step, self._note)
            response = ocp.save_async(str(folder), state)
        except (OSError, ValueError, RuntimeError) as error:
            self.failures += 1
            raise SaveFailed(step, self.directory, error) from error
        self._pending = _Save(step, lambda: self._finish(response, folder, step, arrays, plain))
        self._pending.start()
        if block:
            self.wait()

    def _finish(self, response: Any, folder: Path, step: int, arrays: Table, meta: dict[str, Any]) -> None:
        """Wait for Orbax, commit, prune. Runs in the save's thread."""
        response.result()
        if self._process == 0:
            try:
                write_manifest(folder, step, arrays, meta, self._note)
                self._verified.discard(step)
                for old in layout.surplus(self.steps(), self._config.keep, self._config.keep_every):
                    layout.remove(self.directory, old)
            finally:
                self._barrier(f"checkpoint-{step}")
        else:
            self._barrier(f"checkpoint-{step}")
            if not (folder / layout.MANIFEST).exists():
                raise FileNotFoundError(f"process 0 wrote no {layout.MANIFEST}")

    def poll(self) -> bool:
        """Whether no save is under way; call it every step, so that no failure stays unseen.

        Raises:
          SaveFailed: the last save failed. Raised once; ``failures`` counts them.
        """
        if self._pending is not None and self._pending.is_alive():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
          SaveFailed: it failed. Raised once.
        """
        if self._pending is None:
            return
        self._pending.join()
        save, self._pending = self._pending, None
        if save.error is None:
            self.failures = 0
            return
        self.failures += 1
        raise SaveFailed(save.step, self.directory, save.error) from save.error

    # What there is

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending, read from storage."""
        return layout.list_steps(self.directory)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return max(self.steps(), default=None)

    def retire(self, after: int) -> None:
        """Set checkpoints later than ``after`` aside (by renaming), before a run goes on from there. Process 0."""
        self.wait()
        for place in layout.retire(self.directory, after):
            self._note(f"set aside a checkpoint later than step {after}: {place}")

    def verify(self, step: int) -> list[str]:
        """Check the manifest and every file's size and SHA-256; returns what is wrong, one line each."""
        folder = layout.step_folder(self.directory, step)
        try:
            faults = verify_files(folder, read_manifest(folder), self._note)
        except (OSError, ValueError) as error:
            faults = [str(error)]
        if not faults:
            self._verified.add(step)
        return faults

    def newest_good(self) -> int | None:
        """The newest step that verifies; damaged newer ones are reported by ``note`` and passed over."""
        for step in reversed(self.steps()):
            faults = self.verify(step)
            if not faults:
                return step
            self._note(f"WARNING: checkpoint {step} in {self.directory} is damaged and passed over: {faults[0]}")
        return None

    # Restoring

    def restore(self, step: int, abstract: Tree) -> tuple[Tree, dict[str, Any]]:
        """The state and meta of a step.

        Args:
          step: which checkpoint.
          abstract: the state as jax.ShapeDtypeStruct with the shardings to restore to.

        Raises:
          CheckpointRefused: no such step, damaged files, or arrays that are missing, extra, of another shape or of
            another dtype; each is named.
        """
        folder = layout.step_folder(self.directory, step)
        found = differences(self.checked_manifest(step)["arrays"], array_table(abstract)).lines()
        if found:
            raise CheckpointRefused(_refusal(folder, found))
        return read_all(folder, abstract), self.meta(step)

    def meta(self, step: int) -> dict[str, Any]:
        """What the run said of itself when it saved the step.

        Raises:
          CheckpointRefused: no such step, or damaged files.
        """
        return self.checked_manifest(step)["meta"]

    def checked_manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step whose files are as written (hashed once); raises like ``meta``."""
        steps = self.steps()
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointRefused(f"{self.directory}: no checkpoint of step {step}; there: {there}")
        faults = [] if step in self._verified else self.verify(step)
        if faults:
            older = next((s for s in reversed(steps) if s < step and not self.verify(s)), None)
            cure = f"step {older} is good: resume from it with run.resume: {self.directory.parent}@{older}"
            raise CheckpointRefused(
                f"{layout.step_folder(self.directory, step)} is damaged and was not loaded:\n  "
                + "\n  ".join(faults)
                + "\n"
                + (cure if older is not None else "no older checkpoint here is good")
            )
        return read_manifest(layout.step_folder(self.directory, step))


def restore_subtree(
    directory: str | PathLike[str],
    step: int,
    abstract: Tree,
    partial: bool = False,
    *,
    key: str | None = "params",
    note: Callable[[str], None] = layout.ignore,
) -> tuple[Tree, list[str], list[str], list[str]]:
    """One branch of a saved state, such as the weights without the optimizer's.

    Args:
      directory: the ``checkpoints`` folder of the run that saved it.
      step: which checkpoint.
      abstract: the branch as nested dicts of jax.ShapeDtypeStruct with shardings.
      partial: let arrays be missing, unexpected or reshaped; they are returned by name.
      key: the branch's key in the state; None where ``abstract`` holds several whole branches by their keys, such as
        params and buffers (then other branches are no difference).
      note: hears about long verification.

    Returns:
      (the arrays that fit, missing, unexpected, reshaped); names are dotted, without ``key``.

    Raises:
      CheckpointRefused: no such step, damaged files, or (without ``partial``) arrays that do not fit.
    """
    manager = CheckpointManager(directory, CheckpointConfig(), note=note)
    folder = layout.step_folder(manager.directory, step)
    stored = manager.checked_manifest(step)["arrays"]
    prefixes = (f"{key}.",) if key else tuple(f"{name}." for name in abstract)
    branch = {
        name: entry for name, entry in stored.items() if name.startswith(prefixes) or (not key and name in abstract)
    }
    if not branch:
        raise CheckpointRefused(f"{folder} holds no arrays under {' or '.join(p[:-1] for p in prefixes)}")
    if key:
        branch = {name.removeprefix(f"{key}."): entry for name, entry in branch.items()}
    wanted = array_table(abstract)
    found = differences(branch, wanted)
    if found.lines() and not partial:
        cure = "run.init_partial: true begins with the arrays that fit and names the others"
        raise CheckpointRefused(f"{_refusal(folder, found.lines())}\n{cure}")
    fitting = {name for name in wanted if branch.get(name) == wanted[name]}
    if not fitting:
        return {}, found.missing, found.unexpected, found.reshaped
    chosen = select(abstract, fitting)
    tree = read_some(folder, {key: chosen})[key] if key else read_some(folder, chosen)
    return tree, found.missing, found.unexpected, found.reshaped


def _refusal(folder: Path, found: list[str], most: int = 12) -> str:
    """One screen of differing arrays."""
    more = [f"... and {len(found) - most} more"] if len(found) > most else []
    return f"{folder} does not fit this model and was not loaded:\n  " + "\n  ".join(found[:most] + more)
