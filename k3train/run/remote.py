"""A run folder in an object store, as run/directory.py uses it: a local folder, a lock, pushing. Imports no JAX."""

import os
import shutil
import socket
import sys

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import make_ready
from k3train.config.storage import storage
from k3train.run.aside import Every
from k3train.run.lease import Lease
from k3train.run.lock import RunLock
from k3train.run.mirror import Mirror, mirror_folder, small_objects

PUSH_S = 5.0
"""Seconds between two looks for what has changed in the mirror."""


class RemoteFolder:
    """A process's part in a run folder of an object store.

    Args:
      address: the run folder in the store.
      root: ``run.mirror``.
      process: this process's number. Process 0 holds the folder; the others only add files of their own.

    Raises:
      UserError: the store's package is missing (exit 33).
    """

    def __init__(self, address: str, root: str | None, process: int):
        make_ready(address)
        self.address = address.rstrip("/")
        self.path = mirror_folder(self.address, root, "" if process == 0 else f"-{process}")
        """The mirror: what is written there gets into the store."""
        self._mirror = Mirror(self.address, self.path)
        self._lease: Lease | None = None
        self._pushing: Every | None = None

    def names(self) -> list[str]:
        """Names of the files and folders in the run folder.

        Raises:
          UserError: the store cannot be read (exit 33).
        """
        with storage(self.address, "read the run folder"):
            return sorted({name.partition("/")[0] for name in small_objects(self.address)})

    def open(self, lock: str) -> RunLock:
        """Take the lock (the file ``lock`` of the mirror, then the store's) and fetch what is there.

        Returns the mirror's lock.

        Raises:
          UserError: another trainer holds it (exit 33), or the store refuses.
        """
        with storage(self.path, "make the mirror"):
            self.path.mkdir(parents=True, exist_ok=True)
        held = RunLock(self.path / lock)
        file = (self.path / lock).stat()
        seat = f"{socket.gethostname()}:{file.st_dev}:{file.st_ino}"
        try:
            self._lease = Lease(self.address, note=_tell, lost=_leave, seat=seat)
            self._mirror.pull()
        except BaseException:
            self.finish()
            held.release()
            raise
        return held

    def begin_beside(self) -> None:
        """Begin as a process other than 0, with nothing but what it will write."""
        with storage(self.path, "make the mirror"):
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """Push from now on whatever changes."""
        self._pushing = Every(self.address, PUSH_S, lambda: self._mirror.push(everything=False), _tell)
        self._pushing.start()

    def push(self) -> None:
        """Push everything now.

        Raises:
          UserError: the store refuses, or another trainer has taken the folder (exit 33).
        """
        with storage(self.address, "write to the run folder"):
            if self._lease is not None:
                self._lease.check()
            self._mirror.push()

    def finish(self) -> None:
        """Push what is left and let go of the store; one that does not answer is said, and hides nothing else.

        May be called twice.
        """
        if self._pushing is not None:
            self._pushing.stop()
            self._pushing = None
            try:
                self.push()
            except UserError as error:
                _tell(f"WARNING: {error}; the latest records lie in {self.path}")
        if self._lease is not None:
            self._lease.release()
            self._lease = None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(text: str) -> None:
    """Another trainer has the folder: whatever this process would still do, it would do to that one's run."""
    _tell(f"k3train: error: {text}")
    os._exit(ExitCode.RUN_FOLDER)
