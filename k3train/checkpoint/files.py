"""Files of a checkpoint, on disk or in an object store (``gs://``, ``s3://``): list, size, read, write. Imports no JAX.

Paths are epath's, which are pathlib's on disk. Object stores have no rename, no append and no empty folders, so nothing
here uses them.
"""

import hashlib
import os
import pathlib
from typing import Any, cast

from etils.epath import Path

from k3train.config.exit_codes import ExitCode
from k3train.config.storage import write_whole


def in_object_store(path: Path) -> bool:
    """Whether a path names an object store rather than a disk."""
    return "://" in str(path)


def size_of(path: Path) -> int:
    """Bytes of a file. (epath's own stat looks up the owner's name, which a container may not have.)"""
    return path.stat().length if in_object_store(path) else pathlib.Path(path).stat().st_size


def files_below(folder: Path) -> dict[str, int]:
    """Size in bytes of every file under ``folder`` but hidden ones, by relative name."""
    found = (place / name for place, _, names in folder.walk() for name in names if name[:1] != ".")
    return {str(path.relative_to(folder)): size_of(path) for path in sorted(found)}


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def put(path: Path, text: str) -> None:
    """Write a small file whole or not at all; an object store's put is so by itself.

    Raises:
      UserError: the disk is full (exit 60).
      OSError: the object store refuses.
    """
    if in_object_store(path):
        path.write_text(text)
    else:
        write_whole(pathlib.Path(path), text, ExitCode.SAVE_FAILED)


def evict(path: Path) -> None:
    """Let the system forget what it remembers of a file, so that the next read comes from the disk."""
    if not in_object_store(path) and hasattr(os, "posix_fadvise"):
        with pathlib.Path(path).open("rb") as file:
            os.fsync(file.fileno())  # only written-out pages are forgotten
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
