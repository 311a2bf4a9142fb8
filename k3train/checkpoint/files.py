"""Files of a checkpoint, on disk or in an object store (``gs://``, ``s3://``): list, size, read, write. Imports no JAX.

Paths are epath's, which are pathlib's on disk. Object stores have no rename, no append and no empty folders, so nothing
here uses them.
"""

import hashlib
import os
import pathlib
from contextlib import suppress
from typing import Any, cast

from etils.epath import Path

from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import in_object_store, make_ready, objects_below
from k3train.config.storage import write_whole


def place(path: str | os.PathLike[str]) -> Path:
    """The path, from the root of the file system where it lies on a disk; ready to be used where it does not.

    Raises:
      UserError: the object store's package is missing (exit 33).
    """
    make_ready(path)
    # epath takes an address for a relative path.
    return Path(path) if in_object_store(path) else Path(path).expanduser().absolute()


def names_in(folder: Path) -> list[str]:
    """Names of the files and folders in ``folder``; none where it is no folder (object stores keep no empty ones)."""
    try:
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    except FileNotFoundError:  # it went away meanwhile
        return []


def size_of(path: Path) -> int:
    """Bytes of a file. (epath's own stat looks up the owner's name, which a container may not have.)"""
    return path.stat().length if in_object_store(path) else pathlib.Path(path).stat().st_size


def files_below(folder: Path) -> dict[str, int]:
    """Size in bytes of every file under ``folder`` but hidden ones, by relative name."""
    if in_object_store(folder):
        return {name: stamp.size for name, stamp in objects_below(folder).items() if name.split("/")[-1][:1] != "."}
    found = (place / name for place, _, names in folder.walk() for name in names if name[:1] != ".")
    sizes = {}
    for path in sorted(found):
        with suppress(FileNotFoundError):  # a trainer deletes the checkpoint meanwhile
            sizes[str(path.relative_to(folder))] = size_of(path)
    return sizes


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
            # Only pages that are written out are forgotten; and an error of writing them out is told here.
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
