"""Small files a run leaves behind: written whole or not at all, and a full disk said plainly. Imports no JAX."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import in_object_store

_CURES = {
    errno.ENOSPC: "no space left on the device; free some space or choose another run.dir",
    errno.EDQUOT: "the disk quota is used up; free some space or choose another run.dir",
    errno.EFBIG: "the file would exceed the allowed file size (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another run.dir",
    errno.EACCES: "no permission to write there; choose another run.dir or mend the permissions",
    errno.EPERM: "no permission to write there; choose another run.dir or mend the permissions",
}


def storage_error(path: object, error: OSError, doing: str, exit_code: ExitCode = ExitCode.RUN_FOLDER) -> UserError:
    """The message for a file operation that the system refused; names the path, the reason and the cure."""
    reason = _CURES.get(error.errno or 0, error.strerror or str(error))
    return UserError(f"{path}: cannot {doing}: {reason}", exit_code)


@contextmanager
def storage(path: object, doing: str, exit_code: ExitCode = ExitCode.RUN_FOLDER) -> Iterator[None]:
    """Turn an OSError of the body, or any failure of an object store, into a UserError about ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error, doing, exit_code) from error
    except Exception as error:
        # Each store's library has error classes of its own.
        if isinstance(error, UserError) or not in_object_store(path):
            raise
        raise UserError(f"{path}: cannot {doing}: {error}", exit_code) from error


def write_whole(path: Path, text: str, exit_code: ExitCode = ExitCode.RUN_FOLDER) -> None:
    """Replace a file in one move, so that a reader (or a crash) meets the old text or the new, never a part.

    Raises:
      UserError: the disk is full or refuses the write; the old file is untouched.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with storage(path, "write", exit_code):
        try:
            with part.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        # The new name itself must survive a power cut too.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
