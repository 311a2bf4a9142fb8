"""Writes a store's splits: documents spooled as they come, then copied in shuffled order into shards. Imports no JAX.

A document's side and place follow from its text alone (sha256, keyed by the shuffle seed for the place), so the same
documents make the same store in whatever order, and from whatever files, they are read.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from k3train.data.header import ORIGIN_NAMES, ORIGINS, FileEntry, SplitHeader
from k3train.data.sources import Document
from k3train.data.store import OFFSETS, TOKEN_BYTES, shard_name

HOLDOUT_RULE = "held out where the first 8 bytes of sha256(UTF-8 text), big-endian, are below holdout * 2**64"
SHARD_TOKENS = 1 << 29
_BYTES_DTYPE = np.dtype("<u4")


def is_held_out(digest: bytes, holdout: float) -> bool:
    """Whether the document whose text has this sha256 is never trained on (``HOLDOUT_RULE``)."""
    return int.from_bytes(digest[:8], "big") < holdout * 2.0**64


class Spool:
    """Documents of one split in the order they came: tokens on disk, what the shuffle needs in memory."""

    def __init__(self, stem: Path, dtype: str, with_bytes: bool):
        self.dtype = np.dtype(dtype)
        self._tokens_path, self._bytes_path = stem.with_suffix(".spool"), stem.with_suffix(".bytes_spool")
        self._tokens_file = self._tokens_path.open("wb")
        self._bytes_file = self._bytes_path.open("wb") if with_bytes else None
        self._lengths: list[int] = []
        self._keys: list[bytes] = []
        self._names: dict[str, int] = {}
        self._origins = array("q")  # [documents, 3]: number of the file's name, line, byte offset
        self.tokens = 0
        self.source_bytes = 0
        self.min_id, self.max_id = 0, -1

    @property
    def documents(self) -> int:
        """Documents so far."""
        return len(self._lengths)

    def add(self, ids: np.ndarray, token_bytes: np.ndarray, digest: bytes, seed: int, origin: Document) -> None:
        """One document: ids (int [n], n > 0), the bytes of text each stands for (int [n]), the sha256 of its text."""
        name = self._names.setdefault(origin.file, len(self._names))
        self._origins.extend((name, origin.line, origin.offset))
        self._tokens_file.write(ids.astype(self.dtype).tobytes())
        if self._bytes_file is not None:
            self._bytes_file.write(token_bytes.astype(_BYTES_DTYPE).tobytes())
        low, high = int(ids.min()), int(ids.max())
        self.min_id = min(self.min_id, low) if self._lengths else low
        self.max_id = max(self.max_id, high)
        self._lengths.append(len(ids))
        self._keys.append(hashlib.sha256(seed.to_bytes(8, "little") + digest).digest()[:16])
        self.tokens += len(ids)
        self.source_bytes += int(token_bytes.sum())

    def close(self) -> None:
        """Close the files; nothing can be added any more."""
        for file in (self._tokens_file, self._bytes_file):
            if file is not None:
                file.close()

    def finish(self, folder: Path, shard_tokens: int) -> tuple[SplitHeader, list[FileEntry]]:
        """Write the split into ``folder`` in shuffled order and remove the spool."""
        folder.mkdir()
        self.close()
        keys = np.frombuffer(b"".join(self._keys), ">u8").reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))  # [documents]
        lengths = np.array(self._lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        places = list(zip(starts[order].tolist(), lengths[order].tolist(), strict=True))
        files = _copy(self._tokens_path, self.dtype, places, shard_tokens, lambda i: folder / shard_name(i))
        if self._bytes_file is not None:
            whole = max(self.tokens, 1)
            files += _copy(self._bytes_path, _BYTES_DTYPE, places, whole, lambda _: folder / TOKEN_BYTES)
        offsets = np.concatenate([[0], np.cumsum(lengths[order])]).astype("<i8")
        files.append(write_file(folder / OFFSETS, [offsets.tobytes()]))
        origins = np.array(self._origins, "<i8").reshape(-1, 3)[order]
        files.append(write_file(folder / ORIGINS, [origins.tobytes()]))
        files.append(write_file(folder / ORIGIN_NAMES, [json.dumps(list(self._names)).encode()]))
        for spool in (self._tokens_path, self._bytes_path):
            spool.unlink(missing_ok=True)
        counts = SplitHeader(
            documents=self.documents,
            tokens=self.tokens,
            source_bytes=self.source_bytes,
            min_id=self.min_id,
            max_id=self.max_id,
        )
        return counts, files


def write_file(path: Path, parts: list[bytes] | Iterator[bytes]) -> FileEntry:
    """Write the parts one after the other; the header's entry for the file (named below the store folder)."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
    return FileEntry(name=f"{path.parent.name}/{path.name}", bytes=size, sha256=digest.hexdigest())


def _copy(
    source: Path, dtype: np.dtype, places: list[tuple[int, int]], per_file: int, name: Callable[[int], Path]
) -> list[FileEntry]:
    """Copy the (start, length) stretches of ``source`` in order into files of ``per_file`` elements each."""
    total = sum(length for _, length in places)
    if total == 0:
        return []
    values = np.memmap(source, dtype, mode="r")
    stretches = iter(places)
    left: tuple[int, int] = next(stretches)

    def fill(room: int) -> Iterator[bytes]:
        nonlocal left
        while room:
            start, length = left
            taken = min(length, room)
            yield values[start : start + taken].tobytes()
            room -= taken
            left = (start + taken, length - taken) if taken < length else next(stretches, (0, 0))

    return [write_file(name(i), fill(min(per_file, total - i * per_file))) for i in range(-(-total // per_file))]
