"""The token store: a folder of token shards with document offsets and a verified header. Imports no JAX.

header.json              what lies here and what it was made from (``data/header.py``)
skips.jsonl              records left out: file, line, byte offset, reason
train/tokens-00000.bin   little-endian uint16 (uint32 where ids need it), documents one after the other
train/doc_offsets.bin    int64 [documents + 1], first token of each document, then the count of tokens
train/doc_origins.bin    int64 [documents, 3], where each came from: number of the file, line from 1, byte offset
train/doc_origin_names.json  names of those files
train/doc_metadata.jsonl     the metadata fields of each document, where some are named, and doc_metadata_offsets.bin,
                             int64 [documents + 1], first byte of each document's line
train/masked.bin             int64 [n, 2], tokens [start, stop) that are no target of the loss, where some are not
holdout/...              the same for documents that are never trained on, and
holdout/token_bytes.bin  uint32 [tokens], UTF-8 bytes of text that each token stands for
"""

import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k3train.config.errors import UserError
from k3train.data.header import (
    EXTENTS,
    MASKED,
    METADATA,
    METADATA_OFFSETS,
    ORIGIN_NAMES,
    ORIGINS,
    Header,
    SplitHeader,
    TokenFile,
)
from k3train.data.integrity import CURE, damage, read_header, refuse_address
from k3train.data.token_reader import TokenReader
from k3train.data.tokenizer import Tokenizer

SKIPS = "skips.jsonl"
TRAIN, HOLDOUT = "train", "holdout"
OFFSETS = "doc_offsets.bin"
TOKEN_BYTES = "token_bytes.bin"


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"tokens-{index:05d}.bin"


class Origin(NamedTuple):
    """Where a document stood when the store was made."""

    file: str
    line: int
    """Counted from 1."""
    offset: int
    """Bytes from the start of the (uncompressed) file."""


class Split:
    """One side of a store (train or holdout); tables are mapped, tokens read as they are asked for."""

    def __init__(self, folder: Path, counts: SplitHeader, dtype: str, shard_tokens: int):
        self.folder = folder
        self.counts = counts
        self.dtype = np.dtype(dtype)
        self.shard_tokens = shard_tokens

    @property
    def tokens(self) -> int:
        """Tokens in all documents, BOS and EOS included."""
        return self.counts.tokens

    @property
    def documents(self) -> int:
        """Documents."""
        return self.counts.documents

    @cached_property
    def doc_offsets(self) -> np.ndarray:
        """int64 [documents + 1]."""
        return _mapped(self.folder / OFFSETS, np.dtype("<i8"))

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """uint32 [tokens]; the holdout side has it."""
        return _mapped(self.folder / TOKEN_BYTES, np.dtype("<u4"))

    @cached_property
    def masked(self) -> np.ndarray:
        """Tokens [start, stop) that are no target of the loss, int64 [n, 2], rising; [0, 2] where all are."""
        file = self.folder / MASKED
        return _mapped(file, np.dtype("<i8")).reshape(-1, 2) if file.exists() else np.zeros((0, 2), np.int64)

    def mask(self, start: int, stop: int, to: np.ndarray) -> None:
        """Sets ``to``, bool [stop - start], where tokens [start, stop) are no target of the loss."""
        # Borders rise through all ranges: an odd number of them before a token means that it lies within one.
        first, last = self.masked.reshape(-1).searchsorted((start, stop), side="right").tolist()
        for begin, end in self.masked[first // 2 : (last + 1) // 2].tolist():
            to[max(begin - start, 0) : end - start] = True

    def origin(self, document: int) -> Origin | None:
        """Where a document came from; None in a store that was made before this was kept."""
        if not (self.folder / ORIGINS).exists():
            return None
        name, line, offset = self._origins[document].tolist()
        return Origin(self._origin_names[name], line, offset)

    def metadata(self, document: int) -> dict[str, Any]:
        """The metadata fields of a document; empty where none were named."""
        if not (self.folder / METADATA).exists():
            return {}
        start, stop = self._metadata_offsets[document : document + 2].tolist()
        return json.loads(self._metadata[start:stop].tobytes())

    @cached_property
    def _metadata(self) -> np.ndarray:
        return _mapped(self.folder / METADATA, np.dtype("u1"))

    @cached_property
    def _metadata_offsets(self) -> np.ndarray:
        return _mapped(self.folder / METADATA_OFFSETS, np.dtype("<i8"))

    @cached_property
    def _origins(self) -> np.ndarray:
        return _mapped(self.folder / ORIGINS, np.dtype("<i8")).reshape(-1, 3)

    @cached_property
    def _origin_names(self) -> list[str]:
        return json.loads((self.folder / ORIGIN_NAMES).read_text(encoding="utf-8"))

    @cached_property
    def _shards(self) -> list[TokenReader]:
        count = -(-self.tokens // self.shard_tokens)
        return [TokenReader(self.folder / shard_name(i), self.dtype) for i in range(count)]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop), int32 [stop - start].

        Raises:
          UserError: an id is larger than the header says (a damaged file).
        """
        tokens = np.empty(stop - start, np.int32)
        self.copy(start, stop, tokens)
        self.check(tokens, start)
        return tokens

    def copy(self, start: int, stop: int, to: np.ndarray) -> None:
        """Tokens [start, stop) into ``to``, not checked yet."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens}")
        at = 0
        for part in self._parts(start, stop):
            to[at : at + len(part)] = part
            at += len(part)

    def check(self, tokens: np.ndarray, start: int) -> None:
        """Raise UserError where ids of tokens from about ``start`` on are not among those the header names."""
        if len(tokens) and not self.counts.min_id <= int(tokens.min()) <= int(tokens.max()) <= self.counts.max_id:
            raise UserError(
                f"{self.folder}: token ids {int(tokens.min())}..{int(tokens.max())} near token {start}, "
                f"but the header says {self.counts.min_id}..{self.counts.max_id}; a file is damaged. {CURE}"
            )

    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        at = start
        while at < stop:
            shard, inside = divmod(at, self.shard_tokens)
            end = min(self.shard_tokens, inside + stop - at)
            yield self._shards[shard].read(inside, end)
            at += end - inside

    def check_files(self, listed: set[str]) -> None:
        """Raise UserError where the token files do not hold the header's tokens; ``listed`` are the header's files."""
        shards = [shard_name(i) for i in range(-(-self.tokens // self.shard_tokens))]
        for name in (OFFSETS, *shards):
            if f"{self.folder.name}/{name}" not in listed:
                raise UserError(f"{self.folder / name}: not listed in the header. {CURE}")
        held = sum((self.folder / name).stat().st_size for name in shards)
        if held != self.tokens * self.dtype.itemsize:
            raise UserError(f"{self.folder}: token files and {OFFSETS} do not agree with the header. {CURE}")

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document, int32."""
        return self.read(int(self.doc_offsets[index]), int(self.doc_offsets[index + 1]))


class InPlaceSplit(Split):
    """One side of a store whose tokens lie in files of others."""

    def __init__(self, folder: Path, counts: SplitHeader, dtype: str, token_files: list[TokenFile]):
        super().__init__(folder, counts, dtype, shard_tokens=1)
        self._token_files = token_files

    @cached_property
    def _extents(self) -> np.ndarray:
        return _mapped(self.folder / EXTENTS, np.dtype("<i8")).reshape(-1, 3)

    @cached_property
    def _arrays(self) -> list[TokenReader]:
        return [TokenReader(Path(file.path), np.dtype(file.dtype)) for file in self._token_files]

    def _parts(self, start: int, stop: int) -> Iterator[np.ndarray]:
        firsts = self._extents[:, 0]
        number, at = int(np.searchsorted(firsts, start, side="right")) - 1, start
        while at < stop:
            first, file, place = self._extents[number].tolist()
            end = min(int(firsts[number + 1]) if number + 1 < len(firsts) else self.tokens, stop)
            yield self._arrays[file].read(place + at - first, place + end - first).astype(np.int64)
            at, number = end, number + 1

    def check_files(self, listed: set[str]) -> None:
        """See ``Split.check_files``; the files of others must be as long as they were."""
        for name in (OFFSETS, EXTENTS):
            if f"{self.folder.name}/{name}" not in listed:
                raise UserError(f"{self.folder / name}: not listed in the header. {CURE}")
        for file in self._token_files:
            if not Path(file.path).is_file():
                raise UserError(
                    f"{file.path}: not there, and {self.folder.parent} reads its tokens in place; bring it back"
                )
            if (size := Path(file.path).stat().st_size) != file.bytes:
                raise UserError(
                    f"{file.path}: {size} bytes, and it had {file.bytes} when {self.folder.parent} was made of it; "
                    "make it anew (k3train data prepare CONFIG --replace)"
                )


class Store:
    """An opened token store: ``train`` and ``holdout`` splits and the header."""

    def __init__(self, path: Path, header: Header):
        self.path = path
        self.header = header
        self.train = self._split(TRAIN, header.train)
        self.holdout = self._split(HOLDOUT, header.holdout_split)

    def _split(self, name: str, counts: SplitHeader) -> Split:
        header = self.header
        if header.token_files:
            return InPlaceSplit(self.path / name, counts, header.dtype, header.token_files)
        return Split(self.path / name, counts, header.dtype, header.shard_tokens)

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which tokens are read where; a checkpoint keeps it."""
        return self.header.fingerprint

    @property
    def max_id(self) -> int:
        """Largest token id in either split."""
        return max(self.header.train.max_id, self.header.holdout_split.max_id)

    @property
    def pad_id(self) -> int:
        """Token id that fills padding; 0 where the tokenizer has none."""
        return self.header.tokenizer.pad_id or 0

    def check_vocab(self, vocab_size: int) -> None:
        """Raise UserError where the store holds ids that a model of ``vocab_size`` has no embedding for."""
        if self.max_id >= vocab_size:
            raise UserError(
                f"{self.path}: the store holds token id {self.max_id}, but model.vocab_size is {vocab_size} "
                f"(ids 0..{vocab_size - 1}). Set model.vocab_size to at least {self.header.tokenizer.vocab_size}, the "
                "tokenizer's vocabulary, or prepare the store with another tokenizer"
            )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError where ``tokenizer`` is not the one that made the store."""
        made_by = self.header.tokenizer
        if (tokenizer.kind, tokenizer.fingerprint) != (made_by.kind, made_by.fingerprint):
            raise UserError(
                f"{self.path}: made by tokenizer {made_by.kind} {made_by.fingerprint[:12]}, but data.tokenizer is "
                f"{tokenizer.kind} {tokenizer.fingerprint[:12]}. Name the tokenizer it was made with, or another store"
            )

    def verify(self, most: int | None = None) -> int:
        """Read files and compare their sha256 with the header's.

        Args:
          most: bytes of tokens to read; shards that would go past them are left out. The other files, by which every
            token finds its document, are always read. None reads everything.

        Returns:
          Bytes that were left out.

        Raises:
          UserError: naming the first file that differs.
        """
        left_out = read = 0
        for entry in self.header.files:
            if most is not None and "/tokens-" in entry.name:
                if read + entry.bytes > most:
                    left_out += entry.bytes
                    continue
                read += entry.bytes
            with (self.path / entry.name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != entry.sha256:
                where = damage(self.path / entry.name, entry)
                raise UserError(f"{self.path / entry.name}: contents differ from the header's checksum{where}. {CURE}")
        for tokens in self.header.token_files:
            if most is not None and read + tokens.bytes > most:
                left_out += tokens.bytes
                continue
            read += tokens.bytes
            with Path(tokens.path).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != tokens.sha256:
                    raise UserError(
                        f"{tokens.path}: changed since {self.path} was made of it; bring the file back, or make the "
                        "store anew (k3train data prepare CONFIG --replace)"
                    )
        return left_out


def open_store(path: str | Path, *, vocab_size: int | None = None, tokenizer: Tokenizer | None = None) -> Store:
    """Open a token store and check its header, file sizes and offsets (``Store.verify`` reads the contents too).

    Raises:
      UserError: no store, a broken header, a file missing or of the wrong size, ids past ``vocab_size``, another
        tokenizer.
    """
    refuse_address(path)
    path = Path(path)
    try:
        return _open(path, vocab_size, tokenizer)
    except OSError as error:
        raise UserError(f"{path}: the token store cannot be read ({error.strerror or error})") from error


def _open(path: Path, vocab_size: int | None, tokenizer: Tokenizer | None) -> Store:
    store = Store(path, read_header(path))
    for entry in store.header.files:
        file = path / entry.name
        if not file.is_file():
            raise UserError(f"{file}: missing from the token store. {CURE}")
        if (size := file.stat().st_size) != entry.bytes:
            raise UserError(f"{file}: {size} bytes, but the header says {entry.bytes}; truncated or changed. {CURE}")
    for split in (store.train, store.holdout):
        _check_split(split, {entry.name for entry in store.header.files})
    if vocab_size is not None:
        store.check_vocab(vocab_size)
    if tokenizer is not None:
        store.check_tokenizer(tokenizer)
    return store


def _check_split(split: Split, listed: set[str]) -> None:
    """Token files cover the tokens, and the offsets run from 0 to the last token without a step back."""
    split.check_files(listed)
    offsets = split.doc_offsets
    if (
        len(offsets) != split.documents + 1
        or int(offsets[0]) != 0
        or int(offsets[-1]) != split.tokens
        or bool((np.diff(offsets) <= 0).any())
    ):
        raise UserError(f"{split.folder}: token files and {OFFSETS} do not agree with the header. {CURE}")


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    """The file as a read-only array, a plain one since memmap's own slices are slow; an empty file cannot be mapped."""
    if file.stat().st_size == 0:
        return np.zeros(0, dtype)
    return np.memmap(file, dtype, mode="r").view(np.ndarray)
