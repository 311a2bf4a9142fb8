"""The manifest of a checkpoint: size and SHA-256 of every file, the arrays, their hashes, what the run says of itself.

Orbax restores bit-flipped array files without a word (operations.md 2.3), so integrity is ours. The manifest is
written after everything else and is the commit marker. Imports no JAX.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from etils.epath import Path

from k3train.checkpoint.files import evict, files_below, put, sha256, size_of

MANIFEST = "manifest.json"
QUARANTINED, RETIRED, KEEP = "quarantined.json", "retired.json", "keep.json"
MARKERS = (MANIFEST, QUARANTINED, RETIRED, KEEP)
FORMAT = 2
_BIG = 1 << 30  # bytes from which hashing is worth a message
Note = Callable[[str], None]


def ignore(_: str) -> None:
    """A note nobody wants to read."""


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own content, so that a flipped digit in it is seen too."""
    body = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Commit a step's folder.

    Args:
      folder: complete but for the manifest.
      content: ``step``, ``kind``, ``files`` (``{name: {size, sha256}}``), ``arrays`` (dtype and shape by dotted name),
        ``state_hash``, ``eval``, ``fingerprint`` (of the config) and ``meta`` (JSON that the run wants back).

    Raises:
      UserError: the disk is full (exit 60).
    """
    content = {"format": FORMAT, "time": time.time(), **content}
    put(folder / MANIFEST, json.dumps(content | {"digest": digest(content)}, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a step's folder.

    Raises:
      ValueError: it is absent, unreadable, of another format or changed since it was written; the text says which.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if content.get("digest") != digest(content):
        raise ValueError(f"{MANIFEST} has changed since it was written")
    return content


def share(sizes: dict[str, int], index: int, count: int) -> list[str]:
    """The files that process ``index`` of ``count`` hashes: dealt out by size, largest first to the least laden."""
    loads, mine = [0] * count, []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        loads[least] += sizes[name] + 1  # empty files count too
        if least == index:
            mine.append(name)
    return mine


def hash_files(
    folder: Path, names: list[str], note: Note = ignore, *, fresh: bool = False, advance: Callable[[int], Any] = id
) -> dict[str, str]:
    """SHA-256 of the named files; several at once, since hashing leaves the interpreter lock.

    Args:
      folder: the step's.
      names: relative to it.
      note: hears about the hashing of big checkpoints.
      fresh: read what storage holds rather than the system's memory of what was written, where the system allows.
      advance: hears the bytes of each file done.
    """
    sizes = {name: size_of(folder / name) for name in names}
    total = sum(sizes.values())
    done, said, lock = 0, time.monotonic(), threading.Lock()
    if total >= _BIG:
        note(f"hashing {folder}: {total / 2**30:.1f} GiB in {len(sizes)} files")

    def one(name: str) -> str:
        nonlocal done, said
        if fresh:
            evict(folder / name)
        result = sha256(folder / name)
        with lock:
            done += sizes[name]
            advance(sizes[name])
            if total >= _BIG and time.monotonic() - said > 10:
                said = time.monotonic()
                note(f"hashing {folder}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB")
        return result

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        # Largest first, so that no thread is left alone with a big one.
        largest_first = sorted(sizes, key=lambda name: -sizes[name])
        return dict(zip(largest_first, pool.map(one, largest_first), strict=True))


def data_files(folder: Path) -> dict[str, int]:
    """Size in bytes of each file that a manifest must list, by relative name: all but the markers."""
    return {name: size for name, size in files_below(folder).items() if name not in MARKERS}


def verify_share(
    folder: Path,
    manifest: dict[str, Any],
    note: Note = ignore,
    *,
    index: int = 0,
    count: int = 1,
    fresh: bool = False,
    advance: Callable[[int], Any] = id,
) -> list[str]:
    """What is wrong with this process's share of the step's files, one line each; empty when all are as written.

    Arguments as ``hash_files`` and ``share``.
    """
    wanted = manifest["files"]
    faults, present = [], []
    for name in share({name: entry["size"] for name, entry in wanted.items()}, index, count):
        try:
            size = size_of(folder / name)
        except FileNotFoundError:
            faults.append(f"{name} is missing")
            continue
        if size != wanted[name]["size"]:
            faults.append(f"{name} has {size} bytes, {wanted[name]['size']} were written")
        else:
            present.append(name)
    hashes = hash_files(folder, present, note, fresh=fresh, advance=advance)
    return faults + [
        f"{name} has changed since it was written (SHA-256 differs)"
        for name in present
        if hashes[name] != wanted[name]["sha256"]
    ]
