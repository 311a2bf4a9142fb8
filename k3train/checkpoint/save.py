"""One save, from the arrays to the verified checkpoint, in a thread beside the training.

Orbax copies the arrays to the host (the training waits for that only) and writes them. The processes then hash the
files between them, process 0 commits by writing the manifest, and the files are read back from storage and compared.
Only then may anything older be deleted.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils.epath import Path
from orbax.checkpoint import v1 as ocp

from k3train.checkpoint import state_hash
from k3train.checkpoint.arrays import Tree, array_table
from k3train.checkpoint.layout import begin_save, end_save, mark
from k3train.checkpoint.manifest import (
    QUARANTINED,
    Note,
    data_files,
    hash_files,
    read_manifest,
    share,
    verify_share,
    write_manifest,
)
from k3train.checkpoint.orbax_store import orbax_context
from k3train.checkpoint.policies import Kind
from k3train.config.fingerprint import fingerprint
from k3train.parallel.coordination import Peers


class Order(NamedTuple):
    """What is to be saved."""

    step: int
    kind: Kind
    meta: dict[str, Any]
    score: float | None
    """eval/holdout/loss at this step, where it is known."""


class Save(threading.Thread):
    """A save under way.

    Args:
      directory: the ``checkpoints`` folder.
      order: step, kind and what goes into the manifest.
      state: the arrays; they may be donated once ``copied`` is set.
      peers: the processes that save together.
      busy: names of the folders that saves of this process are writing; this one adds and takes away its own.
      run_id: the run that saves.
      timeout_s: time after which the save is overdue.
      note: hears about leftovers and long hashing.
      before_commit: called on process 0 before the checkpoint counts; the save fails where it raises.
      after: called on process 0 once the checkpoint is verified: deletes what is no longer wanted.

    Attributes:
      copied: set when the arrays are on the host, or the save has ended.
      error: what it failed of; None while it runs and where it did not.
      good: whether the checkpoint is committed and verified.
      abandoned: set by who gives up on it; it then commits nothing more, unless it is at it.
      folder: the step's folder, once it is chosen.
    """

    def __init__(
        self,
        directory: Path,
        order: Order,
        state: Tree,
        *,
        peers: Peers,
        busy: set[str],
        run_id: str | None,
        timeout_s: float,
        note: Note,
        before_commit: Callable[[], None],
        after: Callable[[], None],
    ):
        # A daemon: a save that hangs must not keep the process from ending.
        super().__init__(name=f"save-{order.step}", daemon=True)
        self.order, self.copied, self.error, self.good, self.abandoned = order, threading.Event(), None, False, False
        self.folder: Path | None = None
        self.label = peers.name("save")
        self._directory, self._peers, self._busy, self._note, self._after = directory, peers, busy, note, after
        self._run_id, self._before_commit = run_id, before_commit
        self._deadline = time.monotonic() + timeout_s
        self._state: Tree = state
        self._arrays = array_table(state)
        self._sums = state_hash.begin(state)

    def left_s(self) -> float:
        """Seconds until the save is overdue; 0 where it is."""
        return max(0.0, self._deadline - time.monotonic())

    def run(self) -> None:
        """Do it all; called by ``start``."""
        try:
            folder = self._write()
            self._commit(folder)
            self._read_back(folder)
            self.good = True
        except BaseException as error:  # carried to the training thread
            self.error: BaseException | None = error
            return
        finally:
            self._state = None
            self.copied.set()
            if self.folder is not None:
                self._busy.discard(self.folder.name)
        if self._peers.leads and not self.abandoned:
            try:
                self._after()
            except Exception as error:
                self._note(f"WARNING: {self._directory}: older checkpoints could not be deleted: {error}")

    def _write(self) -> Path:
        """Choose the folder and let Orbax write it."""
        name = self._peers.lead(
            f"{self.label}/begin",
            lambda: begin_save(self._directory, self.order.step, self._busy, self._run_id, self._note).name,
        )
        self.folder = folder = self._directory / name
        self._refuse_abandoned()

        def write() -> None:
            with orbax_context(folder):
                response = ocp.save_async(str(folder), self._state)
            self._state = None
            self.copied.set()
            response.result()

        self._peers.together(f"{self.label}/written", write)
        return folder

    def _refuse_abandoned(self) -> None:
        if self.abandoned:
            raise TimeoutError("given up on before it ended")

    def _commit(self, folder: Path) -> None:
        """Hash the files between the processes; process 0 writes the manifest."""
        peers, label = self._peers, self.label
        sizes: dict[str, int] = peers.lead(f"{label}/files", lambda: data_files(folder))
        mine = share(sizes, peers.index, peers.count)
        found = peers.together(f"{label}/hashed", lambda: hash_files(folder, mine, self._note))
        hashes: dict[str, str] = {name: value for part in found for name, value in part.items()}

        def commit() -> None:
            arrays = state_hash.fetch(self._sums)
            self._before_commit()
            self._refuse_abandoned()
            content = {
                "step": self.order.step,
                "kind": self.order.kind,
                "files": {name: {"size": sizes[name], "sha256": hashes[name]} for name in sorted(sizes)},
                "arrays": self._arrays,
                "state_hash": {"all": state_hash.combined(arrays), "arrays": arrays},
                "eval": self.order.score,
                "fingerprint": fingerprint(self.order.meta.get("config", {})),
                "meta": self.order.meta,
            }
            write_manifest(folder, content)
            end_save(folder)

        peers.lead(f"{label}/committed", commit)
        # Nobody gets past "hashed" before all have read what came before it.
        peers.forget(f"{label}/written")

    def _read_back(self, folder: Path) -> None:
        """Compare what storage now holds with what was written; a checkpoint that differs is quarantined."""
        peers, label = self._peers, self.label

        def check() -> list[str]:
            manifest = read_manifest(folder)
            return verify_share(folder, manifest, self._note, index=peers.index, count=peers.count, fresh=True)

        faults = [fault for part in peers.together(f"{label}/verified", check) for fault in part]
        if faults:
            reason = f"read back after the save: {faults[0]}"
            peers.lead(f"{label}/quarantined", lambda: mark(folder, QUARANTINED, reason))
            raise ValueError(f"{folder}: {reason}")
