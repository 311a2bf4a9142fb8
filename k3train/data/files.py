"""Source files on a disk or in an object store: found, opened, told apart. Imports no JAX."""

import glob
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import filesystem, in_object_store
from k3train.config.storage import storage
from k3train.data.header import SourceFile

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".array_record", ".arrayrecord")

SUFFIXES_OF = {"text": SUFFIXES, "megatron": (".bin",), "token_array": ("",)}
"""What the files of each ``data.source.kind`` are called."""


def find_files(patterns: tuple[str, ...], suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Files of the paths, globs and addresses, each once (links followed), in the order of the patterns, sorted within.

    A folder that ``save_to_disk`` of Hugging Face datasets wrote stands for the files that its state names.

    Raises:
      UserError: a pattern matches nothing, a path is a folder, or a file is of a kind that is not read.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        if in_object_store(pattern):
            for address in _objects(pattern):
                _check_suffix(address, suffixes, pattern)
                found.setdefault(address, address)
            continue
        for path in _local(pattern):
            _check_suffix(path.name, suffixes, pattern, path)
            found.setdefault(os.path.realpath(path), str(path))
    return list(found.values())


def describe(path: str) -> SourceFile:
    """Size and contents of a file: sha256 on a disk, the store's own mark (ETag) of an object.

    Raises:
      UserError: it cannot be read.
    """
    if in_object_store(path):
        with storage(path, "read", ExitCode.CONFIG):
            info = _filesystem(path).info(path)
        mark = str(info.get("ETag") or info.get("etag") or info.get("md5Hash"))
        return SourceFile(path=path, bytes=int(info["size"]), mtime_ns=0, sha256="", version=mark)
    try:
        stat = Path(path).stat()
        return SourceFile(path=path, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256_of(Path(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _filesystem(path: str) -> Any:
    """The file system of an address; one that is not known, or whose package is missing, is a fault of the config."""
    try:
        return filesystem(path)
    except UserError as error:
        raise UserError(f"data.source.files: {error}") from error


def size_of(path: str) -> int:
    """Bytes of a file or object."""
    return int(_filesystem(path).info(path)["size"]) if in_object_store(path) else Path(path).stat().st_size


def sha256_of(file: Path) -> str:
    """Checksum of a file on a disk."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """The file or object, to be read from any place in it.

    Raises:
      UserError: it cannot be read.
    """
    with storage(path, "read", ExitCode.CONFIG) if in_object_store(path) else _disk(path), _open(path) as file:
        yield file


def _open(path: str) -> Any:
    if in_object_store(path):
        # fsspec's own file reads lines of any length only.
        return io.BufferedReader(_filesystem(path).open(path, "rb"), 1 << 20)
    return Path(path).open("rb")


@contextmanager
def on_disk(path: str) -> Iterator[str]:
    """A path on this disk with the contents of the file, for libraries that open files themselves."""
    if not in_object_store(path):
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="k3train-") as folder, storage(path, "read", ExitCode.CONFIG):
        local = str(Path(folder) / path.rpartition("/")[2])
        _filesystem(path).get_file(path, local)
        yield local


@contextmanager
def _disk(path: str) -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


def _check_suffix(name: str, suffixes: tuple[str, ...], pattern: str, path: object = None) -> None:
    if not name.endswith(suffixes):
        raise UserError(
            f"data.source.files: {path or name} is none of {', '.join(suffixes)}; narrow the pattern {pattern}"
        )


def _objects(pattern: str) -> list[str]:
    """Addresses that a pattern with a scheme names."""
    scheme = pattern.partition("://")[0]
    with storage(pattern, "look up", ExitCode.CONFIG):
        fs = _filesystem(pattern)
        if glob.has_magic(pattern):
            names = sorted(fs.glob(pattern))
        else:
            names = [fs._strip_protocol(pattern)] if fs.isfile(pattern) else []
            if not names and fs.isdir(pattern):
                raise UserError(f"data.source.files: {pattern} is a folder; name its files, as in {pattern}/*.jsonl")
    if not names:
        raise UserError(f"data.source.files: no object matches {pattern}")
    return [f"{scheme}://{name}" for name in names]


def _local(pattern: str) -> list[Path]:
    try:
        paths = _expand(pattern)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"data.source.files: {pattern} cannot be looked up ({reason})") from error
    if not paths:
        raise UserError(f"data.source.files: no file matches {pattern} (seen from {Path.cwd()})")
    files = []
    for path in paths:
        if not path.exists():
            raise UserError(f"data.source.files: {path} is a link to nothing; mend or remove it")
        if not path.is_dir() and not path.is_file():
            raise UserError(f"data.source.files: {path} is a pipe or a device, not a file; write its contents to one")
        files += _dataset_files(path) if path.is_dir() else [path]
    return files


def _expand(pattern: str) -> list[Path]:
    """Files that the path or glob names, and links to nothing among them; empty where there are none."""
    named = Path(pattern).expanduser()
    if glob.has_magic(str(named)) and not named.exists():
        found = [Path(name) for name in sorted(glob.glob(str(named), recursive=True))]  # noqa: PTH207
        return [path for path in found if not path.is_dir() or _is_dataset(path)]
    return [named] if named.exists() else []


def _is_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _dataset_files(folder: Path) -> list[Path]:
    """Arrow files of a folder that ``save_to_disk`` wrote."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        names = " or ".join(f"{folder}/{split}" for split in splits)
        raise UserError(f"data.source.files: {folder} holds several splits; name one: {names}")
    if not _is_dataset(folder):
        raise UserError(f"data.source.files: {folder} is a folder; name its files, as in {folder}/**/*.txt")
    try:
        entries = json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]
        files = [folder / entry["filename"] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}/state.json: broken ({error!r}); write the dataset to disk again") from error
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing}: named by {folder}/state.json, but not there; copy the whole dataset")
    return files
