"""One trainer a folder: a lock the kernel drops when its holder dies, however it dies. Imports no JAX."""

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.storage import storage


class RunLock:
    """An exclusive lock on ``path``, which names its holder.

    Raises:
      UserError: another process holds it (exit 33, naming its pid and host), or the file cannot be made.
    """

    def __init__(self, path: Path):
        self._path = path
        with storage(path, "lock"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise
        holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}) + "\n"
        with storage(path, "write"):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, holder.encode(), 0)

    def _take(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{self._path.parent} is in use by {self._holder()}; stop that trainer or choose another run.dir",
                ExitCode.RUN_FOLDER,
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            print(f"WARNING: {self._path.parent}: this file system has no locks; start no second trainer here")

    def _holder(self) -> str:
        try:
            holder = json.loads(os.pread(self._file, 4096, 0))
            return f"process {holder['pid']} on {holder['host']}"
        except (ValueError, KeyError, TypeError):
            return "another process"

    def release(self) -> None:
        """Let go; the file stays and is empty, so that no stale holder is read from it."""
        if self._file >= 0:
            with suppress(OSError):  # a full or vanished disk must not hide how the run ended
                os.ftruncate(self._file, 0)
            os.close(self._file)
            self._file = -1
