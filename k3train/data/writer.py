"""Writes a store's splits: documents of each piece as they come, then merged in shuffled order. Imports no JAX.

A document's side and place follow from its text alone (sha256, keyed by the shuffle seed for the place), so the same
documents make the same store in whatever order, from whatever files and by however many workers they are read.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from k3train.data.header import (
    BLOCK_BYTES,
    MASKED,
    METADATA,
    METADATA_OFFSETS,
    ORIGIN_NAMES,
    ORIGINS,
    FileEntry,
    SplitHeader,
)
from k3train.data.records import Document
from k3train.data.store import OFFSETS, TOKEN_BYTES, shard_name

HOLDOUT_RULE = "held out where the first 8 bytes of sha256(UTF-8 text), big-endian, are below holdout * 2**64"
SHARD_TOKENS = 1 << 29
_BYTES_DTYPE = np.dtype("<u4")
_COLUMNS = 6
"""Of a document in a piece: tokens, number of its file's name, line, byte offset, bytes of metadata, masked ranges."""


def is_held_out(digest: bytes, holdout: float) -> bool:
    """Whether the document whose text has this sha256 is never trained on (``HOLDOUT_RULE``)."""
    return int.from_bytes(digest[:8], "big") < holdout * 2.0**64


class Side:
    """Documents of one piece and one side in the order they come, written below ``stem``."""

    def __init__(self, stem: Path, dtype: str, *, with_bytes: bool, with_metadata: bool, with_mask: bool):
        self.dtype = np.dtype(dtype)
        self._stem = stem
        self._tokens = stem.with_suffix(".tokens").open("wb")
        self._bytes = stem.with_suffix(".bytes").open("wb") if with_bytes else None
        self._metadata = stem.with_suffix(".metadata").open("wb") if with_metadata else None
        self._masked = stem.with_suffix(".masked").open("wb") if with_mask else None
        self._documents = array("q")  # [documents, _COLUMNS]
        self._keys = bytearray()  # [documents, 16]
        self._names: dict[str, int] = {}
        self.documents = self.tokens = self.source_bytes = 0
        self.min_id, self.max_id = 0, -1

    def add(
        self,
        document: Document,
        ids: np.ndarray,
        digest: bytes,
        seed: int,
        spans: np.ndarray | None,
        masked: list[tuple[int, int]],
    ) -> None:
        """One document.

        Args:
          document: where it came from.
          ids: int [n], n > 0, BOS and EOS included.
          digest: sha256 of its text.
          seed: key of the shuffle.
          spans: bytes of text that each token stands for, int [n], where the side keeps them.
          masked: its tokens [start, stop) that are no target of the loss, where the side keeps them.
        """
        self._tokens.write(ids.astype(self.dtype).tobytes())
        if self._bytes is not None:
            assert spans is not None
            self._bytes.write(spans.astype(_BYTES_DTYPE).tobytes())
        metadata = b""
        if self._metadata is not None:
            metadata = json.dumps(document.metadata, default=str).encode() + b"\n"
            self._metadata.write(metadata)
        if self._masked is not None:
            self._masked.write(np.array(masked, "<i8").tobytes())
        low, high = int(ids.min()), int(ids.max())
        self.min_id = min(self.min_id, low) if self.documents else low
        self.max_id = max(self.max_id, high)
        name = self._names.setdefault(document.file, len(self._names))
        self._documents.extend((len(ids), name, document.line, document.offset, len(metadata), len(masked)))
        self._keys += hashlib.sha256(seed.to_bytes(8, "little") + digest).digest()[:16]
        self.documents += 1
        self.tokens += len(ids)
        self.source_bytes += len(document.text.encode("utf-8"))

    def close(self) -> None:
        """Close the files; nothing can be added any more."""
        for file in (self._tokens, self._bytes, self._metadata, self._masked):
            if file is not None:
                file.close()

    def finish(self) -> dict[str, Any]:
        """Close and write what the merge needs; the counts."""
        self.close()
        self._stem.with_suffix(".documents").write_bytes(np.array(self._documents, "<i8").tobytes())
        self._stem.with_suffix(".keys").write_bytes(bytes(self._keys))
        self._stem.with_suffix(".names").write_text(json.dumps(list(self._names)), encoding="utf-8")
        names = ("documents", "tokens", "source_bytes", "min_id", "max_id")
        return {name: getattr(self, name) for name in names}


class Merge:
    """One side of all pieces: the order of its documents, and the files of the store that follow from it.

    ``plan`` is written to a file, so that other processes write shards of it.
    """

    def __init__(self, folders: list[Path], side: str, counts: list[dict[str, Any]], first_lines: list[int]):
        """Order the documents.

        Args:
          folders: of the finished pieces, in order.
          side: ``train`` or ``holdout``.
          counts: what ``Side.finish`` said of each.
          first_lines: lines of the file before each piece.
        """
        self.folders, self.side = folders, side
        names: dict[str, int] = {}
        keys: list[bytes] = []
        documents: list[np.ndarray] = []
        pieces: list[np.ndarray] = []
        starts: list[np.ndarray] = []
        for number, (folder, first) in enumerate(zip(folders, first_lines, strict=True)):
            stem = folder / side
            found = np.frombuffer(stem.with_suffix(".documents").read_bytes(), "<i8").reshape(-1, _COLUMNS).copy()
            local = json.loads(stem.with_suffix(".names").read_text(encoding="utf-8"))
            numbers = np.array([names.setdefault(name, len(names)) for name in local], np.int64)
            if len(found):
                found[:, 1] = numbers[found[:, 1]]
                found[:, 2] += first
            documents.append(found)
            keys.append(stem.with_suffix(".keys").read_bytes())
            pieces.append(np.full(len(found), number, np.int64))
            starts.append(np.cumsum(found[:, 0]) - found[:, 0])
        key = np.frombuffer(b"".join(keys), ">u8").reshape(-1, 2)
        self._order = np.lexsort((key[:, 1], key[:, 0]))  # [documents]
        self._documents, self._names = np.concatenate(documents), list(names)
        self._piece_of = np.concatenate(pieces)
        places = np.stack([self._piece_of, np.concatenate(starts), self._documents[:, 0]], axis=1)
        self.plan = places[self._order]  # [documents, 3]: piece, first token in it, tokens
        filled = [c for c in counts if c["documents"]]
        self.header = SplitHeader(
            documents=len(self._order),
            tokens=int(self.plan[:, 2].sum()),
            source_bytes=sum(c["source_bytes"] for c in filled),
            min_id=min((c["min_id"] for c in filled), default=0),
            max_id=max((c["max_id"] for c in filled), default=-1),
        )

    def write_tables(self, folder: Path) -> list[FileEntry]:
        """Offsets, origins and metadata of the documents, into ``folder``."""
        ordered = self._documents[self._order]
        offsets = np.concatenate([[0], np.cumsum(ordered[:, 0])]).astype("<i8")
        files = [write_file(folder / OFFSETS, [offsets.tobytes()])]
        files.append(write_file(folder / ORIGINS, [np.ascontiguousarray(ordered[:, 1:4], "<i8").tobytes()]))
        files.append(write_file(folder / ORIGIN_NAMES, [json.dumps(self._names).encode()]))
        if ordered[:, 5].any():
            files.append(write_file(folder / MASKED, [self._masked(offsets[:-1]).tobytes()]))
        if not ordered[:, 4].any():
            return files
        sizes = self._documents[:, 4]
        ends = np.cumsum(sizes)
        before = np.concatenate([[0], ends])[np.searchsorted(self._piece_of, np.arange(len(self.folders)))]
        starts = ends - sizes - before[self._piece_of]
        places = np.stack([self._piece_of, starts, sizes], axis=1)[self._order]
        texts = stretches(self.folders, f"{self.side}.metadata", np.dtype("u1"), places, 0, int(sizes.sum()))
        files.append(write_file(folder / METADATA, texts))
        table = np.concatenate([[0], np.cumsum(sizes[self._order])]).astype("<i8")
        files.append(write_file(folder / METADATA_OFFSETS, [table.tobytes()]))
        return files

    def _masked(self, starts: np.ndarray) -> np.ndarray:
        """Tokens [start, stop) of the side that are no target of the loss, int64 [n, 2].

        Args:
          starts: first token of each document, in the order of the side.
        """
        counts = self._documents[:, 5]
        kept = [(folder / f"{self.side}.masked").read_bytes() for folder in self.folders]
        spans = np.frombuffer(b"".join(kept), "<i8").reshape(-1, 2)
        firsts, ordered = (np.cumsum(counts) - counts)[self._order], counts[self._order]
        before = np.repeat(np.cumsum(ordered) - ordered, ordered)
        which = np.arange(len(spans)) - before + np.repeat(firsts, ordered)
        return spans[which] + np.repeat(starts, ordered)[:, None]


def write_shard(
    folders: list[Path], side: str, plan: np.ndarray, dtype: str, index: int, shard_tokens: int, out: Path
) -> FileEntry:
    """Shard ``index`` of a side: tokens [index * shard_tokens, ...) of its documents in the plan's order."""
    start = index * shard_tokens
    stop = min(start + shard_tokens, int(plan[:, 2].sum()))
    return write_file(out / shard_name(index), stretches(folders, f"{side}.tokens", np.dtype(dtype), plan, start, stop))


def write_token_bytes(folders: list[Path], side: str, plan: np.ndarray, out: Path) -> FileEntry:
    """Bytes of text of each token of a side."""
    parts = stretches(folders, f"{side}.bytes", _BYTES_DTYPE, plan, 0, int(plan[:, 2].sum()))
    return write_file(out / TOKEN_BYTES, parts)


def stretches(
    folders: list[Path], name: str, dtype: np.dtype, places: np.ndarray, start: int, stop: int
) -> Iterator[bytes]:
    """Elements [start, stop) of what the (piece, first element, count) ``places`` name one after the other."""
    ends = np.cumsum(places[:, 2])
    values: dict[int, np.ndarray] = {}
    first = int(np.searchsorted(ends, start, side="right"))
    at = start
    for (piece, begin, count), end in zip(places[first:].tolist(), ends[first:].tolist(), strict=True):
        if at >= stop:
            return
        if piece not in values:
            values[piece] = np.memmap(folders[piece] / name, dtype, mode="r") if count else np.zeros(0, dtype)
        inside = at - (end - count)
        taken = min(count - inside, stop - at)
        yield values[piece][begin + inside : begin + inside + taken].tobytes()
        at += taken


def write_file(path: Path, parts: list[bytes] | Iterator[bytes]) -> FileEntry:
    """Write the parts one after the other; the header's entry for the file (named below the store folder)."""
    digest, size, blocks, crc = hashlib.sha256(), 0, [], 0
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            view = memoryview(part)
            while len(view):
                room = BLOCK_BYTES - size % BLOCK_BYTES
                crc = zlib.crc32(view[:room], crc)
                size += min(room, len(view))
                view = view[room:]
                if size % BLOCK_BYTES == 0:
                    blocks.append(f"{crc:08x}")
                    crc = 0
    if size % BLOCK_BYTES:
        blocks.append(f"{crc:08x}")
    return FileEntry(
        name=f"{path.parent.name}/{path.name}",
        bytes=size,
        sha256=digest.hexdigest(),
        block_bytes=BLOCK_BYTES,
        blocks=tuple(blocks),
    )
