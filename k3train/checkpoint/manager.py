"""The checkpoints of a run: when to save, which are good, what to go on from.

One save is under way at a time (checkpoint/save.py). With several processes every method but ``should_save``, ``poll``
and ``note_score`` is called by all of them at the same step; process 0 decides, writes and deletes.
"""

import json
import time
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from etils.epath import Path

from k3train.checkpoint import layout
from k3train.checkpoint.arrays import Tree, array_table, differences, read_all, refusal
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused, SaveFailed
from k3train.checkpoint.files import place
from k3train.checkpoint.layout import Entry
from k3train.checkpoint.manifest import QUARANTINED, Note, read_manifest, verify_share
from k3train.checkpoint.policies import Kind, due, kept, surplus
from k3train.checkpoint.save import Order, Save
from k3train.checkpoint.state_hash import state_hash
from k3train.parallel.coordination import Peers


class CheckpointManager:
    """The checkpoints of one run.

    Args:
      directory: the run's ``checkpoints`` folder; made where absent.
      config: when to save and what to keep.
      peers: the processes that save and restore together.
      run_id: whose checkpoints count; those of other runs are passed over. None takes any.
      note: hears about ignored, removed and failed things, one line each.
      before_commit: called on the leading process before a checkpoint counts; the save fails where it raises.
    """

    def __init__(
        self,
        directory: str | PathLike[str],
        config: CheckpointConfig,
        *,
        peers: Peers | None = None,
        run_id: str | None = None,
        note: Note = print,
        before_commit: Callable[[], None] = lambda: None,
    ):
        self.directory = place(directory)
        self.failures = 0
        """Saves that failed since the last that did not."""
        self.newest_verified: int | None = None
        """Newest step that this manager saved or verified and found good."""
        self.peers = peers or Peers()
        self._config, self._run_id, self._note = config, run_id, note
        self._before_commit = before_commit
        self._pending: Save | None = None
        self._told: Save | None = None
        self._busy: set[str] = set()
        self._scores: dict[int, float] = {}
        self._good: set[Path] = set()

    # When

    def should_save(self, step: int, last_time: float) -> Kind | None:
        """The kind of save that the policy wants after ``step``; ``last_time``: ``time.monotonic()`` of the last save.

        With several processes, whose clocks differ, only one of them may be asked where ``every_minutes`` is set.
        """
        return due(self._config, step, time.monotonic() - last_time)

    def note_score(self, step: int, value: float) -> None:
        """Remember eval/holdout/loss at ``step``, for the checkpoint of that step and ``keep_best``."""
        self._scores = {step: value}

    @property
    def exhausted(self) -> bool:
        """Whether as many saves in a row failed as ``max_failures`` allows."""
        return self.failures >= self._config.max_failures

    # Saving

    def save(
        self, step: int, state: Tree, meta: Mapping[str, Any], block: bool = False, kind: Kind = "permanent"
    ) -> None:
        """Begin to save; the arrays may be donated or deleted once this returns.

        A save that is still under way is waited for. Where it failed and nobody heard yet, it is counted and reported
        by ``note``.

        Args:
          step: optimizer steps done.
          state: nested dicts of jax arrays.
          meta: JSON to be given back by ``restore``: step, samples, tokens, config, versions, run_id.
          block: wait until the checkpoint is verified.
          kind: ``temporary`` ones are replaced by the next checkpoint.

        Raises:
          SaveFailed: this save could not begin, or (with ``block``) failed, or an earlier one was the last that
            ``max_failures`` allows.
        """
        plain = json.loads(json.dumps(dict(meta), allow_nan=False))
        try:
            self.wait()
        except SaveFailed as error:
            if self.exhausted:
                raise
            self._note(f"WARNING: {error}")
        self._pending = Save(
            self.directory,
            Order(step, kind, plain, self._scores.get(step)),
            state,
            peers=self.peers,
            busy=self._busy,
            run_id=self._run_id,
            timeout_s=60 * self._config.timeout_minutes,
            note=self._note,
            before_commit=self._before_commit,
            after=lambda: self._delete_surplus(step),
        )
        self._pending.start()
        on_host = self._pending.copied.wait(self._pending.left_s())
        if block or (self.peers.count == 1 and (not on_host or self._failed_already())):
            self.wait()

    def _failed_already(self) -> bool:
        return self._pending is not None and self._pending.error is not None

    def poll(self) -> bool:
        """Whether no save is under way; call it every step, so that no failure stays unseen.

        With several processes a failure is counted, on all of them at once, by the next ``save`` or ``wait``.

        Raises:
          SaveFailed: the last save failed, or is overdue. Raised once; ``failures`` counts them.
        """
        if self._pending is None:
            return True
        ended = self._pending.good or self._failed_already()
        if self.peers.count > 1 and self._failed_already() and self._told is not self._pending:
            self._told = self._pending
            self._note(f"WARNING: saving step {self._pending.order.step} failed: {self._pending.error}")
        if self.peers.count > 1 or not (ended or self._pending.left_s() == 0):
            return ended
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the save under way, no longer than ``timeout_minutes`` allow.

        Raises:
          SaveFailed: it failed, on any process. Raised once.
        """
        if self._pending is None:
            return
        save, self._pending = self._pending, None
        save.join(save.left_s())

        def outcome() -> str | None:
            if save.good:
                return None
            if save.error is None:
                save.abandoned = True
                return f"it has not ended after {self._config.timeout_minutes:g} minutes and was given up on"
            return f"{save.error}" or type(save.error).__name__

        try:
            answers = self.peers.together(f"{save.label}/settled", outcome)
        except RuntimeError as error:  # a process that no longer answers
            answers = [str(error)]
        if not any(answers):
            self.failures, self.newest_verified = 0, save.order.step
            if save.folder is not None:
                self._good.add(save.folder)
            return
        self.failures += 1
        reason = next(answer for answer in answers if answer)
        raise SaveFailed(save.order.step, self.directory, reason, self.failures, self.newest_verified) from save.error

    def _delete_surplus(self, saved: int) -> None:
        """Delete what the policy no longer wants, now that ``saved`` is verified. Runs in the save's thread."""
        entries = layout.complete(layout.scan(self.directory, self._run_id))
        if max(entries, default=None) != saved:  # something newer lies there that this run did not write
            return
        for step in surplus(kept(entries.values()), self._config):
            layout.remove(entries[step].path)

    # What there is

    def entries(self) -> list[Entry]:
        """Every folder named like a step, read from storage."""
        return layout.scan(self.directory, self._run_id)

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending, read from storage."""
        return list(layout.complete(self.entries()))

    def latest(self) -> int | None:
        """The newest checkpoint's step."""
        return max(self.steps(), default=None)

    def retire(self, after: int) -> None:
        """Mark checkpoints later than ``after`` as set aside, before a run goes on from there."""
        self.wait()
        places = self.peers.lead(
            self.peers.name("retire"),
            lambda: [str(path) for path in layout.retire(self.directory, after, self._run_id)],
        )
        for folder in places:
            self._note(f"set aside a checkpoint later than step {after}: {folder}")

    def verify(self, step: int) -> list[str]:
        """Check the manifest and every file's size and SHA-256; returns what is wrong, one line each."""
        return self._verify(self._find(step))

    def _verify(self, path: Path) -> list[str]:
        """What is wrong with a folder's files; the processes share the work and get the same answer."""

        def check() -> list[str]:
            try:
                manifest = read_manifest(path)
                return verify_share(path, manifest, self._note, index=self.peers.index, count=self.peers.count)
            except (OSError, ValueError) as error:
                return [str(error)]

        found = self.peers.together(self.peers.name("verify"), check)
        faults = list(dict.fromkeys(fault for part in found for fault in part))
        if not faults:
            self._good.add(path)
        return faults

    def newest_good(self) -> int | None:
        """The newest step that verifies. Damaged newer ones are quarantined by a marker, and ``note`` is told why.

        Raises:
          CheckpointRefused: more than ``max_fallback`` of the newest are damaged.
        """
        while True:
            candidate = self.peers.lead(self.peers.name("newest"), self._candidate)
            if candidate is None:
                return None
            step, name, passed = candidate
            path = self.directory / name
            faults = self._verify(path)
            if not faults:
                self.newest_verified = step
                return step
            if passed >= self._config.max_fallback:
                raise CheckpointRefused(
                    f"{path} is damaged, and so are the {passed} newer ones ({faults[0]}); nothing was loaded. If "
                    "storage was merely out of order, delete their quarantined.json; to go back further, raise "
                    f"checkpoint.max_fallback (now {self._config.max_fallback})"
                )
            self.peers.lead(self.peers.name("quarantine"), lambda p=path, f=faults: layout.mark(p, QUARANTINED, f[0]))
            self._note(f"WARNING: checkpoint {step} is damaged, passed over and quarantined: {path}: {faults[0]}")

    def _candidate(self) -> tuple[int, str, int] | None:
        """Step and folder of the newest checkpoint, and how many newer ones are quarantined. Process 0."""
        passed = 0
        for entry in reversed(self.entries()):
            match entry.status:
                case "complete" | "damaged":
                    return entry.step, entry.path.name, passed
                case "quarantined":
                    passed += 1
                case "foreign":
                    self._note(f"ignored {entry.path}: {entry.reason}")
        return None

    # Restoring

    def restore(self, step: int, abstract: Tree) -> tuple[Tree, dict[str, Any]]:
        """The state and meta of a step.

        Args:
          step: which checkpoint.
          abstract: the state as jax.ShapeDtypeStruct with the shardings to restore to.

        Raises:
          CheckpointRefused: no such step, damaged files, arrays that are missing, extra, of another shape or of
            another dtype, or (after reading) of another hash than when they were saved; each is named.
        """
        folder, manifest = self.checked(step)
        found = differences(manifest["arrays"], array_table(abstract)).lines()
        if found:
            raise CheckpointRefused(refusal(folder, found))
        tree = read_all(folder, abstract)
        refuse_other_values(folder, manifest, tree)
        return tree, manifest["meta"]

    def meta(self, step: int) -> dict[str, Any]:
        """What the run said of itself when it saved the step.

        Raises:
          CheckpointRefused: no such step, or damaged files.
        """
        return self.checked(step)[1]["meta"]

    def checked(self, step: int) -> tuple[Path, dict[str, Any]]:
        """Folder and manifest of a step whose files are as written (hashed once); raises like ``meta``."""
        folder = self._find(step)
        faults = [] if folder in self._good else self._verify(folder)
        if faults:
            older = next((s for s in reversed(self.steps()) if s < step and not self.verify(s)), None)
            cure = f"step {older} is good: resume from it with run.resume: {self.directory.parent}@{older}"
            raise CheckpointRefused(
                f"{folder} is damaged and was not loaded:\n  "
                + "\n  ".join(faults)
                + "\n"
                + (cure if older is not None else "no older checkpoint here is good")
            )
        return folder, read_manifest(folder)

    def _find(self, step: int) -> Path:
        """The folder of a step; raises CheckpointRefused where there is none."""

        def find() -> list:
            entries = self.entries()
            named = [e.path.name for e in entries if e.step == step and e.status in ("complete", "damaged")]
            return [named[-1] if named else None, list(layout.complete(entries))]

        name, steps = self.peers.lead(self.peers.name("find"), find)
        if name is None:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointRefused(f"{self.directory}: no checkpoint of step {step}; there: {there}")
        return self.directory / name


def refuse_other_values(folder: Path, manifest: dict[str, Any], tree: Tree) -> None:
    """Compare restored arrays with the hashes taken when they were saved.

    Raises:
      CheckpointRefused: some differ; names them.
    """
    saved = manifest["state_hash"]["arrays"]
    other = [name for name, value in state_hash(tree).items() if saved[name] != value]
    if other:
        lines = [f"{name}: other values than were saved" for name in other]
        raise CheckpointRefused(refusal(folder, lines, "has the files that were written, but came back wrong"))
