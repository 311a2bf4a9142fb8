"""A folder that appears whole or not at all: written beside its place, made durable, then renamed. Imports no JAX."""

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from k3train.config.errors import UserError


@contextlib.contextmanager
def exclusive(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the right to write ``folder``; waits while another process has it, and clears what a dead one left.

    The lock is the kernel's, so that a killed process holds it no longer.
    """
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(_beside(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        with disk_errors(folder):
            _clear_leftovers(folder)
        yield
    finally:
        os.close(lock)


def clear_leftovers(folder: Path) -> None:
    """Remove what a dead writer left beside ``folder``; nothing where a writer is at work or the place is read-only."""
    if not any(_beside(folder, what).exists() for what in ("partial", "old", "work")):
        return
    with contextlib.suppress(OSError):
        lock = os.open(_beside(folder, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _clear_leftovers(folder)
            clear_work(folder)
        finally:
            os.close(lock)


def work_folder(folder: Path) -> Path:
    """Where the finished pieces of a store that is being made lie, made if need be. Call inside ``exclusive``."""
    work = _beside(folder, "work")
    work.mkdir(parents=True, exist_ok=True)
    return work


def clear_work(folder: Path) -> None:
    """Remove the finished pieces. Call inside ``exclusive``."""
    shutil.rmtree(_beside(folder, "work"), ignore_errors=True)


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new empty folder to write into, which takes the place of ``folder`` when the block ends well.

    Call inside ``exclusive``. A block that fails leaves ``folder`` as it was.

    Raises:
      UserError: the disk is full or the place is not writable.
    """
    partial, old = _beside(folder, "partial"), _beside(folder, "old")
    try:
        with disk_errors(folder):
            partial.mkdir(parents=True)
            yield partial
            _sync_all(partial)
            if folder.exists():
                folder.rename(old)
            partial.rename(folder)
            _sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _clear_leftovers(folder)
        raise


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Errors of the disk as one line about ``folder``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = _free_bytes(folder)
            raise UserError(
                f"{folder}: no space left on the disk ({free / 1e6:.0f} MB free); the store is as it was. "
                "Free some space, and what was tokenized so far is taken up; or set data.store to another disk"
            ) from error
        raise UserError(
            f"{folder}: cannot be written ({error.strerror or error}); set data.store to a writable place"
        ) from error


def _free_bytes(folder: Path) -> int:
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    return shutil.disk_usage(place).free


def _beside(folder: Path, what: str) -> Path:
    whole = Path(os.path.abspath(folder))  # noqa: PTH100 - "." and ".." have a name of their own only so
    if not whole.name:
        raise UserError(f"{folder}: the top of a disk is no place for a store; set data.store to a folder in it")
    return whole.with_name(f".{whole.name}.{what}")


def _clear_leftovers(folder: Path) -> None:
    """Remove a dead writer's work; where it died between two renames, bring the old folder back."""
    partial, old = _beside(folder, "partial"), _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (partial, old):
        if left.exists():
            shutil.rmtree(left)


def _sync_all(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
