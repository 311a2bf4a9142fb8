"""A store over tokens that lie in files of others: an index is made, and no token is copied. Imports no JAX.

Documents stay in the order of the files (rows are permuted in training anyway). A document is held out by the hash of
its ids. All ids are read once: hashed, checked against the tokenizer's vocabulary, and the first documents of each file
against the policy of BOS and EOS.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3train.config.errors import UserError
from k3train.config.object_store import in_object_store
from k3train.data.build import Progress
from k3train.data.config import DataConfig, SourceConfig
from k3train.data.files import SUFFIXES_OF, describe, find_files
from k3train.data.folder import written_whole
from k3train.data.header import (
    EXTENTS,
    ORIGIN_NAMES,
    ORIGINS,
    FileEntry,
    Header,
    SourceFile,
    SourceHeader,
    SplitHeader,
    TokenFile,
    TokenizerHeader,
)
from k3train.data.integrity import HEADER
from k3train.data.store import HOLDOUT, OFFSETS, SKIPS, TOKEN_BYTES, TRAIN
from k3train.data.token_files import Documents, index_of, read_array, read_megatron
from k3train.data.tokenizer import Tokenizer
from k3train.data.writer import is_held_out, write_file

HOLDOUT_RULE = (
    "held out where the first 8 bytes of sha256(ids as little-endian int32), big-endian, are below holdout * 2**64"
)
_CHECKED = 100
_BLOCK = 1 << 24


class _Placed(NamedTuple):
    """Documents of all files in order; each array [documents]."""

    file: np.ndarray
    start: np.ndarray
    """First token in the file."""
    length: np.ndarray
    is_held: np.ndarray
    number: np.ndarray
    """In its file, from 1."""
    low: np.ndarray
    """Smallest id."""
    high: np.ndarray
    """Largest id."""


def index(config: DataConfig, tokenizer: Tokenizer, progress: Callable[[Progress], None]) -> None:
    """Make the store, whole or not at all. Call inside ``folder.exclusive``.

    Raises:
      UserError: a file is broken, holds ids past the vocabulary, or does not follow the policy of BOS and EOS; nothing
        is left to train on.
    """
    source = config.source
    assert source is not None  # prepare sees to it
    if remote := next((pattern for pattern in source.files if in_object_store(pattern)), None):
        raise UserError(f"{remote}: tokens are read in place, and so must lie on a disk; copy or mount them")
    paths = find_files(source.files, SUFFIXES_OF[source.kind])
    files = [describe(path) for path in paths]
    opened = [_read(Path(path), source) for path in paths]
    total, done, documents = sum(file.bytes for file in files), 0, 0
    held: list[np.ndarray] = []
    ranges: list[np.ndarray] = []
    for path, file, found in zip(paths, files, opened, strict=True):
        ranges.append(_check_ids(path, found, tokenizer, source))
        _check_policy(path, found, config, tokenizer)
        held.append(_held(found, config.holdout))
        done, documents = done + file.bytes, documents + len(held[-1])
        progress(Progress(done, total, documents))
    placed = _place(opened, held, ranges)
    if not (~placed.is_held).any():
        raise UserError(f"data.source: no documents are left to train on ({len(placed.file)} are held out)")
    with written_whole(Path(config.place)) as partial:
        counts, entries = {}, []
        for side, chosen in ((TRAIN, ~placed.is_held), (HOLDOUT, placed.is_held)):
            part = _Placed(*(column[chosen] for column in placed))
            counts[side], written = _write_side(partial / side, part, opened, paths, tokenizer)
            entries += written
        (partial / SKIPS).write_text("")
        header = _header(config, tokenizer, files, opened, counts, entries)
        (partial / HEADER).write_text(header.model_dump_json(indent=1), encoding="utf-8")


def _header(
    config: DataConfig,
    tokenizer: Tokenizer,
    files: list[SourceFile],
    opened: list[Documents],
    counts: dict[str, SplitHeader],
    entries: list[FileEntry],
) -> Header:
    source = config.source
    assert source is not None
    token_files = [
        TokenFile.model_validate(
            {
                "path": str(Path(f.path).absolute()),
                "bytes": f.bytes,
                "sha256": f.sha256,
                "dtype": found.ids.dtype.str,
            }
        )
        for f, found in zip(files, opened, strict=True)
    ]
    return Header(
        dtype="<u2" if all(found.ids.dtype.itemsize <= 2 for found in opened) else "<u4",
        shard_tokens=1,
        tokenizer=TokenizerHeader.of(tokenizer),
        add_bos=config.add_bos,
        add_eos=config.add_eos,
        holdout=config.holdout,
        holdout_rule=HOLDOUT_RULE,
        shuffle_seed=config.shuffle_seed,
        source=SourceHeader(
            kind=source.kind,
            token_type=source.token_type,
            document_end=source.document_end,
            corpus=None,
            patterns=list(source.files),
            text_field=source.text_field,
            metadata_fields=source.metadata_fields,
            on_bad_record=source.on_bad_record,
            licence="not stated",
            files=files,
            indices=[describe(str(index_of(Path(f.path)))) for f in files] if source.kind == "megatron" else [],
        ),
        train=counts[TRAIN],
        holdout_split=counts[HOLDOUT],
        skipped={},
        records=sum(side.documents for side in counts.values()),
        files=entries,
        token_files=token_files,
    )


def _read(path: Path, source: SourceConfig) -> Documents:
    if source.kind == "megatron":
        found = read_megatron(path)
    else:
        assert source.token_type is not None  # the config section sees to it
        found = read_array(path, source.token_type, source.document_end)
    if not len(found.ids):
        raise UserError(f"{path}: empty file; remove it")
    return found


def _check_ids(path: str, found: Documents, tokenizer: Tokenizer, source: SourceConfig) -> np.ndarray:
    """Smallest and largest id of each document, int64 [documents, 2], once all are in the vocabulary."""
    bounds = found.bounds
    ranges = np.empty((len(bounds) - 1, 2), np.int64)
    ranges[:] = np.iinfo(np.int64).max, -1
    for start in range(0, len(found.ids), _BLOCK):
        block = found.ids[start : start + _BLOCK]
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, start + len(block), side="left"))
        begins = np.maximum(bounds[first:last] - start, 0)
        lows, highs = np.minimum.reduceat(block, begins), np.maximum.reduceat(block, begins)
        ranges[first:last, 0] = np.minimum(ranges[first:last, 0], lows)
        ranges[first:last, 1] = np.maximum(ranges[first:last, 1], highs)
        low, high = int(lows.min()), int(highs.max())
        if low >= 0 and high < tokenizer.vocab_size:
            continue
        wrong = high if high >= tokenizer.vocab_size else low
        place = start + int(np.argmax(block == wrong))
        width = " and data.source.token_type" if source.kind == "token_array" else ""
        raise UserError(
            f"{path}: id {wrong} at token {place}, and the tokenizer's ids are 0..{tokenizer.vocab_size - 1}; mend "
            f"data.tokenizer{width}, or bring the tokens that belong to it"
        )
    return ranges


def _check_policy(path: str, found: Documents, config: DataConfig, tokenizer: Tokenizer) -> None:
    """The first documents begin with BOS and end with EOS where the config says so, and only there."""
    starts, stops = found.bounds[:-1][:_CHECKED], found.bounds[1:][:_CHECKED]
    for key, is_wanted, id_, places in (
        ("add_bos", config.add_bos, tokenizer.bos_id, starts),
        ("add_eos", config.add_eos, tokenizer.eos_id, stops - 1),
    ):
        has = found.ids[places] == (-1 if id_ is None else id_)
        if (has != is_wanted).any():
            document = int(np.argmax(has != is_wanted)) + 1
            where = "begins" if key == "add_bos" else "ends"
            does = "does not" if is_wanted else "does"
            raise UserError(
                f"{path}: data.{key} is {str(is_wanted).lower()}, but whether document {document} {where} with the "
                f"tokenizer's {key[4:].upper()} ({id_}): it {does}. Tokens read in place stay as they are: set "
                f"data.{key}: {str(not is_wanted).lower()}, or mend data.tokenizer"
            )


def _held(found: Documents, holdout: float) -> np.ndarray:
    """Whether each document is held out, bool [documents]."""
    held = np.zeros(len(found.bounds) - 1, bool)
    if holdout:
        for i, (start, stop) in enumerate(zip(found.bounds[:-1].tolist(), found.bounds[1:].tolist(), strict=True)):
            held[i] = is_held_out(hashlib.sha256(found.ids[start:stop].astype("<i4").tobytes()).digest(), holdout)
    return held


def _place(opened: list[Documents], held: list[np.ndarray], ranges: list[np.ndarray]) -> _Placed:
    sizes = [len(found.bounds) - 1 for found in opened]
    return _Placed(
        np.repeat(np.arange(len(opened)), sizes),
        np.concatenate([found.bounds[:-1] for found in opened]),
        np.concatenate([np.diff(found.bounds) for found in opened]),
        np.concatenate(held),
        np.concatenate([np.arange(1, size + 1) for size in sizes]),
        *np.concatenate(ranges).T,
    )


def _write_side(
    folder: Path, part: _Placed, opened: list[Documents], paths: list[str], tokenizer: Tokenizer
) -> tuple[SplitHeader, list[FileEntry]]:
    """Tables of one side; the held-out one gets the bytes of text that its tokens stand for."""
    folder.mkdir()
    offsets = np.concatenate([[0], np.cumsum(part.length)]).astype("<i8")
    follows = np.zeros(len(part.file), bool)
    follows[1:] = (part.file[1:] == part.file[:-1]) & (part.start[1:] == part.start[:-1] + part.length[:-1])
    extents = np.stack([offsets[:-1], part.file, part.start], axis=1)[~follows].astype("<i8")
    widths = np.array([found.ids.dtype.itemsize for found in opened], np.int64)
    origins = np.stack([part.file, part.number, part.start * widths[part.file]], axis=1).astype("<i8")
    low, high = (int(part.low.min()), int(part.high.max())) if len(part.file) else (0, -1)
    tables = [(OFFSETS, offsets), (EXTENTS, extents), (ORIGINS, origins)]
    source_bytes = 0
    if folder.name == HOLDOUT:
        places = zip(part.file.tolist(), part.start.tolist(), part.length.tolist(), strict=True)
        spans = [_token_bytes(opened[file].ids[start : start + length], tokenizer) for file, start, length in places]
        table = np.concatenate(spans).astype("<u4") if spans else np.zeros(0, "<u4")
        tables.append((TOKEN_BYTES, table))
        source_bytes = int(table.sum(dtype=np.int64))
    entries = [write_file(folder / name, [np.ascontiguousarray(table).tobytes()]) for name, table in tables]
    entries.append(write_file(folder / ORIGIN_NAMES, [json.dumps(paths).encode()]))
    counts = SplitHeader(
        documents=len(part.file), tokens=int(offsets[-1]), source_bytes=source_bytes, min_id=low, max_id=high
    )
    return counts, entries


def _token_bytes(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of text for each token of a document, int64 [tokens]; special tokens have none.

    The text is decoded and encoded again. Where that gives other ids (they were cut otherwise once), the last token
    counts for all of the text, so that the document's sum is right.
    """
    specials = [id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if id_ is not None]
    plain = np.flatnonzero(~np.isin(ids, specials))
    spans = np.zeros(len(ids), np.int64)
    if not len(plain):
        return spans
    text = tokenizer.decode(ids[plain].astype(np.int64))
    again, lengths = tokenizer.encode_spans(text)
    if np.array_equal(again, ids[plain]):
        spans[plain] = lengths
    else:
        spans[plain[-1]] = len(text.encode("utf-8"))
    return spans
