"""What a worker does: one piece of the sources into a finished folder, one shard of the store. Imports no JAX.

A piece's folder is named after everything that decides its contents, is written under another name and renamed. A
killed prepare leaves whole pieces behind or none, and the next one takes up those whose checksums agree: a piece that a
power cut tore is made again.
"""

import base64
import errno
import hashlib
import json
import os
import shutil
import zlib
from array import array
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from k3train.config.errors import UserError
from k3train.data.config import DataConfig
from k3train.data.fill_in_middle import FillInMiddle, check_joins
from k3train.data.header import SourceFile
from k3train.data.records import BadRecord, Document, Fields, place
from k3train.data.sketch import exact_key, signature
from k3train.data.sources import Piece, read_piece
from k3train.data.store import HOLDOUT, TRAIN
from k3train.data.text_files import count_lines
from k3train.data.tokenizer import Tokenizer
from k3train.data.writer import Side, is_held_out, write_shard, write_token_bytes

REPORT, BAD = "piece.json", "bad.jsonl"
_LAYOUT = 2
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 1 << 20, 256
_CHECKED = 100
"""Documents at the start of each piece in which no special token may stand."""
_QUARANTINED = 1 << 20
"""Bytes of a bad record that are kept."""


@dataclass(frozen=True)
class Work:
    """What every worker of a prepare knows."""

    config: DataConfig
    files: list[SourceFile]
    folder: Path
    """Where pieces are finished."""
    dtype: str
    fingerprint: str
    """Of the tokenizer."""
    duplicates: str = ""
    """sha256 of the list of documents to leave out."""

    @property
    def fields(self) -> Fields:
        """What is taken of a record."""
        source = self.config.source
        assert source is not None  # prepare sees to it
        return Fields(
            source.text_field,
            source.metadata_fields,
            source.max_document_bytes,
            source.prompt_field,
            source.masked_field,
        )

    def name(self, piece: Piece) -> str:
        """Name of a piece's folder: a hash of everything that decides its contents."""
        config, source = self.config, self.config.source
        assert source is not None
        files = [self.files[i] for i in piece.files]
        facts = {
            "layout": _LAYOUT,
            "tokenizer": self.fingerprint,
            "policy": [config.add_bos, config.add_eos, config.holdout, config.shuffle_seed],
            "fields": asdict(self.fields),
            "fill_in_middle": config.fill_in_middle and config.fill_in_middle.model_dump(),
            "source": [source.corpus, source.on_bad_record, self.duplicates],
            "files": [(file.path, file.bytes, file.sha256, file.version) for file in files],
            "stretch": [piece.start, piece.stop],
        }
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]

    def dump(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "config": self.config.model_dump(mode="json"),
            "files": [file.model_dump(mode="json") for file in self.files],
            "folder": str(self.folder),
            "dtype": self.dtype,
            "fingerprint": self.fingerprint,
            "duplicates": self.duplicates,
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> "Work":
        """Back from JSON."""
        return cls(
            DataConfig.model_validate_json(json.dumps(dumped["config"])),
            [SourceFile.model_validate_json(json.dumps(file)) for file in dumped["files"]],
            Path(dumped["folder"]),
            dumped["dtype"],
            dumped["fingerprint"],
            dumped["duplicates"],
        )


def do(
    work: Work, tokenizer: Tokenizer | None, job: dict[str, Any], tick: Callable[[int], None] = lambda _: None
) -> Any:
    """Do one job, as JSON has it: tokenize or sketch a piece, or write a shard or the table of bytes of a side.

    Args:
      work: see there.
      tokenizer: of the config; pieces that are tokenized need it.
      job: ``{"do": "piece", ...}``, ``{"do": "sketch", ...}`` or ``{"do": "shard", ...}``.
      tick: called with the documents of the piece so far.

    Raises:
      UserError: a source cannot be read, or the tokenizer makes special tokens of text.
    """
    if job["do"] in ("piece", "sketch"):
        piece = Piece(tuple(job["files"]), job["start"], job["stop"], job["bytes"])
        if job["do"] == "sketch":
            return sketch_piece(work, piece, job["out"])
        assert tokenizer is not None
        return tokenize_piece(work, tokenizer, piece, {tuple(entry) for entry in job["dropped"]}, tick)
    folders = [work.folder / name for name in job["folders"]]
    plan, out = np.load(work.folder / job["plan"], mmap_mode="r"), Path(job["out"])
    if job["index"] is None:
        entry = write_token_bytes(folders, job["side"], plan, out)
    else:
        entry = write_shard(folders, job["side"], plan, work.dtype, job["index"], job["shard_tokens"], out)
    return entry.model_dump(mode="json")


def sketch_piece(work: Work, piece: Piece, out: str) -> dict[str, Any]:
    """Sketches of a piece's documents into files ``out``.*; their count, or the first bad record under ``error``."""
    source = work.config.source
    assert source is not None
    names: dict[str, int] = {}
    table, keys = array("q"), bytearray()
    with (work.folder / f"{out}.signatures").open("wb") as signatures:
        for record in read_piece(piece, [file.path for file in work.files], work.fields, source.corpus):
            if isinstance(record, BadRecord):
                if source.on_bad_record == "error":
                    if piece.start and record.offset >= 0:
                        before = count_lines(record.file, piece.start)
                        record = replace(record, line=record.line + before)
                    return {"bad": str(record), "stop": True}
                continue
            file, at = place(record)
            table.extend((names.setdefault(file, len(names)), at, len(record.text.encode("utf-8"))))
            keys += exact_key(record.text)
            signatures.write(signature(record.text).tobytes())
    np.save(work.folder / f"{out}.table.npy", np.array(table, np.int64).reshape(-1, 3))
    (work.folder / f"{out}.keys").write_bytes(bytes(keys))
    (work.folder / f"{out}.names").write_text(json.dumps(list(names)), encoding="utf-8")
    return {"documents": len(table) // 3}


def finished(folder: Path) -> dict[str, Any] | None:
    """The report of a finished piece; None where there is none, or it is not as it was written."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        for name, (size, crc) in report["files"].items():
            if (folder / name).stat().st_size != size or _crc(folder / name) != crc:
                return None
    except (OSError, ValueError, KeyError):
        return None
    return report


def tokenize_piece(
    work: Work,
    tokenizer: Tokenizer,
    piece: Piece,
    dropped: set[tuple[str, int]],
    tick: Callable[[int], None],
) -> dict[str, Any]:
    """Read and tokenize a piece into its folder; its report.

    Under ``on_bad_record: error`` the report of the first bad record instead (key ``bad_record``); nothing is kept.
    """
    assert work.config.source is not None
    target = work.folder / work.name(piece)
    partial = work.folder / f"{target.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        writer = _PieceWriter(work, tokenizer, partial, dropped, tick)
        paths = [file.path for file in work.files]
        bad = writer.read(piece, paths)
        if bad is not None:
            return {"bad_record": {k: v for k, v in asdict(bad).items() if k != "raw"}, "stop": True}
        report = writer.finish()
        _put(partial, target)
        return report
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, target: Path) -> None:
    try:
        partial.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        # What lies there was not whole, else the piece would not have been read again.
        shutil.rmtree(target)
        partial.rename(target)


class _PieceWriter:
    """Documents of one piece: batched for the tokenizer, dealt to their sides, counted."""

    def __init__(
        self,
        work: Work,
        tokenizer: Tokenizer,
        folder: Path,
        dropped: set[tuple[str, int]],
        tick: Callable[[int], None],
    ):
        self.work, self.tokenizer, self.folder, self.tick = work, tokenizer, folder, tick
        config = work.config
        assert config.source is not None
        self.policy = config.source.on_bad_record
        metadata = bool(config.source.metadata_fields)
        masked = bool(config.source.prompt_field or config.source.masked_field)
        options = {"with_metadata": metadata, "with_mask": masked}
        self.sides = {
            TRAIN: Side(folder / TRAIN, work.dtype, with_bytes=False, **options),
            HOLDOUT: Side(folder / HOLDOUT, work.dtype, with_bytes=True, **options),
        }
        if masked:
            check_joins(tokenizer, "data.source.prompt_field and masked_field", "take another tokenizer")
        self.before = np.array([tokenizer.bos_id] if config.add_bos else [], np.int32)
        self.after = np.array([tokenizer.eos_id] if config.add_eos else [], np.int32)
        self.specials = [id_ for id_ in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if id_ is not None]
        middle = config.fill_in_middle
        self.fill_in_middle = FillInMiddle(middle, tokenizer) if middle is not None else None
        self.dropped, self.duplicates = dropped, 0
        self.records = self.documents = 0
        self.bad = (folder / BAD).open("w", encoding="utf-8")
        self.bad_kinds: dict[str, int] = {}
        self.batch: list[Document] = []
        self.characters = 0

    def read(self, piece: Piece, paths: list[str]) -> BadRecord | None:
        """All records of the piece; the first bad one under ``error``, at which it stops."""
        source = self.work.config.source
        assert source is not None
        try:
            for record in read_piece(piece, paths, self.work.fields, source.corpus):
                bad = self._record(record)
                if bad is not None:
                    return bad
            return self._flush()
        finally:
            self.bad.close()
            for side in self.sides.values():
                side.close()

    def finish(self) -> dict[str, Any]:
        """Write what the merge needs; the report, which is written last."""
        counts = {name: side.finish() for name, side in self.sides.items()}
        names = sorted(file.name for file in self.folder.iterdir())
        report = {
            "sides": counts,
            "records": self.records,
            "duplicates": self.duplicates,
            "bad": self.bad_kinds,
            "files": {name: ((self.folder / name).stat().st_size, _crc(self.folder / name)) for name in names},
        }
        (self.folder / REPORT).write_text(json.dumps(report), encoding="utf-8")
        return report

    def _record(self, record: Document | BadRecord) -> BadRecord | None:
        self.records += 1
        if isinstance(record, BadRecord):
            return self._flush() or self._refuse(record)
        if place(record) in self.dropped:
            self.duplicates += 1
            return None
        self.batch.append(record)
        self.characters += len(record.text)
        self.documents += 1
        self.tick(self.documents)
        if self.characters >= _BATCH_CHARACTERS or len(self.batch) >= _BATCH_DOCUMENTS:
            return self._flush()
        return None

    def _refuse(self, bad: BadRecord) -> BadRecord | None:
        if self.policy == "error":
            return bad
        self.bad_kinds[bad.kind] = self.bad_kinds.get(bad.kind, 0) + 1
        entry = {name: value for name, value in asdict(bad).items() if name != "raw"} | {"reason": bad.reason}
        if self.policy == "quarantine":
            entry["bytes"] = base64.b64encode(bad.raw[:_QUARANTINED]).decode()
            entry["is_cut"] = len(bad.raw) > _QUARANTINED
        self.bad.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return None

    def _flush(self) -> BadRecord | None:
        """Tokenize the batch."""
        batch, self.batch, self.characters = self.batch, [], 0
        digests = [hashlib.sha256(document.text.encode("utf-8")).digest() for document in batch]
        held = [is_held_out(digest, self.work.config.holdout) for digest in digests]
        learned = [(d, digest) for d, digest, is_held in zip(batch, digests, held, strict=True) if not is_held]
        encoded = iter(self._encode(learned))
        for document, digest, is_held in zip(batch, digests, held, strict=True):
            if is_held:
                both = [self.tokenizer.encode_spans(text) for text, _ in document.parts()]
                parts, spans = [ids for ids, _ in both], np.concatenate([spans for _, spans in both])
            else:
                parts, spans = next(encoded), None
            ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
            bad = self._bad(document, ids)
            if bad is not None:
                refused = self._refuse(bad)
                if refused is not None:
                    return refused
                continue
            self._check(document, ids)
            if self.fill_in_middle is not None and not is_held:
                ids = self.fill_in_middle.join(parts, digest)
            if spans is not None:
                spans = np.pad(spans, (len(self.before), len(self.after)))
            ids = np.concatenate([self.before, ids, self.after])
            side = self.sides[HOLDOUT if is_held else TRAIN]
            masked = self._masked(document, parts) if document.masked else []
            side.add(document, ids, digest, self.work.config.shuffle_seed, spans, masked)
        return None

    def _masked(self, document: Document, parts: list[np.ndarray]) -> list[tuple[int, int]]:
        """Tokens [start, stop) of a document that are no target of the loss, BOS counted; none empty."""
        found, at = [], len(self.before)
        for (_, is_masked), ids in zip(document.parts(), parts, strict=True):
            if is_masked and len(ids):
                found.append((at, at + len(ids)))
            at += len(ids)
        return found

    def _encode(self, documents: list[tuple[Document, bytes]]) -> list[list[np.ndarray]]:
        """Ids of the parts of each (document, sha256 of its text): one, or more where it is cut by its mask, or three
        where its middle is stored last."""
        if self.fill_in_middle is None:
            cut = [[text for text, _ in document.parts()] for document, _ in documents]
        else:
            cut = [self.fill_in_middle.texts(document.text, digest) for document, digest in documents]
        encoded = iter(self.tokenizer.encode_batch([part for parts in cut for part in parts]))
        return [[next(encoded) for _ in parts] for parts in cut]

    def _bad(self, document: Document, ids: np.ndarray) -> BadRecord | None:
        """The document as a bad record where its ids cannot be stored."""
        if not len(ids):
            kind, reason = "no tokens", "the tokenizer makes nothing of it"
        elif self.fill_in_middle is not None and np.isin(ids, self.fill_in_middle.ids).any():
            kind, reason = "special token", "its text spells a token of data.fill_in_middle"
        else:
            return None
        return BadRecord(document.file, document.line, document.offset, kind, reason, document.text.encode("utf-8"))

    def _check(self, document: Document, ids: np.ndarray) -> None:
        """Text alone makes neither special tokens nor ids past the vocabulary."""
        first = sum(side.documents for side in self.sides.values()) < _CHECKED
        if first and np.isin(ids, self.specials).any():
            raise UserError(
                f"{document.file}: line {document.line}: the tokenizer puts BOS, EOS or padding among the ids of "
                "text, where data.add_bos and data.add_eos alone are to put them; bring a tokenizer file without that"
            )
        if int(ids.max()) >= self.tokenizer.vocab_size or int(ids.min()) < 0:
            raise UserError(
                f"{document.file}: line {document.line}: the tokenizer gives id {int(ids.max())}, past its own "
                f"vocabulary of {self.tokenizer.vocab_size}; its file is damaged"
            )


def _crc(file: Path) -> str:
    crc = 0
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
