"""The manifest of a checkpoint: size and SHA-256 of every file, the arrays, and what the run says of itself.

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

from k3train.checkpoint.files import files_below, put, sha256, size_of
from k3train.checkpoint.layout import MANIFEST, ignore

FORMAT = 1
_BIG = 1 << 30  # bytes from which hashing is worth a message


def _digest(content: dict[str, Any]) -> str:
    """SHA-256 of the manifest's own content, so that a flipped digit in it is seen too."""
    body = {key: value for key, value in content.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> dict[str, int]:
    """Size in bytes of each file under the folder but the manifest, by relative name."""
    return {name: size for name, size in files_below(folder).items() if name != MANIFEST}


def _hash_all(folder: Path, sizes: dict[str, int], note: Callable[[str], None]) -> dict[str, str]:
    """SHA-256 of the named files; several at once, since hashing leaves the interpreter lock."""
    total = sum(sizes.values())
    done, said, lock = 0, time.monotonic(), threading.Lock()
    if total >= _BIG:
        note(f"hashing {folder}: {total / 2**30:.1f} GiB in {len(sizes)} files")

    def one(name: str) -> str:
        nonlocal done, said
        result = sha256(folder / name)
        with lock:
            done += sizes[name]
            if total >= _BIG and time.monotonic() - said > 10:
                said = time.monotonic()
                note(f"hashing {folder}: {done / 2**30:.1f} of {total / 2**30:.1f} GiB")
        return result

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        # Largest first, so that no thread is left alone with a big one.
        names = sorted(sizes, key=lambda name: -sizes[name])
        return dict(zip(names, pool.map(one, names), strict=True))


def write_manifest(
    folder: Path, step: int, arrays: dict[str, list], meta: dict[str, Any], note: Callable[[str], None] = ignore
) -> None:
    """Hash the step's files and commit it.

    Args:
      folder: the step's folder, complete but for the manifest.
      step: optimizer steps done.
      arrays: dtype and shape of every array, by dotted name.
      meta: JSON the run wants back (step, samples, tokens, config, versions).
      note: hears about the hashing of big checkpoints.

    Raises:
      UserError: the disk is full (exit 60).
    """
    sizes = _files(folder)
    hashes = _hash_all(folder, sizes, note)
    content = {
        "format": FORMAT,
        "step": step,
        "time": time.time(),
        "files": {name: {"size": sizes[name], "sha256": hashes[name]} for name in sizes},
        "arrays": arrays,
        "meta": meta,
    }
    content["digest"] = _digest(content)
    put(folder / MANIFEST, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a step's folder.

    Raises:
      ValueError: it is absent, unreadable, of another format or changed since it was written; the text says which.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if content.get("digest") != _digest(content):
        raise ValueError(f"{MANIFEST} has changed since it was written")
    return content


def verify_files(folder: Path, manifest: dict[str, Any], note: Callable[[str], None] = ignore) -> list[str]:
    """What is wrong with the step's files, one line each; empty when all sizes and hashes are as written."""
    faults, present = [], {}
    for name, wanted in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name} is missing")
        elif (size := size_of(path)) != wanted["size"]:
            faults.append(f"{name} has {size} bytes, {wanted['size']} were written")
        else:
            present[name] = size
    hashes = _hash_all(folder, present, note)
    return faults + [
        f"{name} has changed since it was written (SHA-256 differs)"
        for name in present
        if hashes[name] != manifest["files"][name]["sha256"]
    ]
