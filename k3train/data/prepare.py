"""Text files or a named corpus into a token store, with an exact account of what was read. Imports no JAX."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.config.errors import UserError
from k3train.data.config import DataConfig, SourceConfig
from k3train.data.corpora import get_corpus, locate, read_corpus
from k3train.data.folder import clear_leftovers, disk_errors, exclusive, written_whole
from k3train.data.header import Header, SourceFile, SourceHeader, TokenizerHeader
from k3train.data.match import difference
from k3train.data.sources import BadRecord, Document, find_files, read_documents
from k3train.data.store import HEADER, SKIPS, Store, open_store
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.data.writer import HOLDOUT_RULE, SHARD_TOKENS, Spool, is_held_out

Say = Callable[[str], None]
VERIFIED = 1 << 30
"""Bytes of tokens that are compared with their checksums when a store is opened: about a second's reading."""


@dataclass(frozen=True)
class Progress:
    """How far a prepare is: bytes of the files read so far and in all, documents so far."""

    bytes_done: int
    bytes_total: int
    documents: int


def prepare(
    config: DataConfig,
    *,
    replace: bool = False,
    say: Say = print,
    progress: Callable[[Progress], None] = lambda _: None,
    shard_tokens: int = SHARD_TOKENS,
) -> Store:
    """Make the store that the config names, or open it where it is there already.

    The store appears whole or not at all; a store that is already there stays until the new one is complete.

    Args:
      config: the data section; ``source`` is needed.
      replace: make it anew even where there is one.
      say: receives lines for a person.
      progress: called as files are read.
      shard_tokens: tokens in a shard.

    Raises:
      UserError: bad input under ``on_bad_record: error``, nothing to train on, a store made otherwise, no disk space.
    """
    folder = Path(config.store)
    if config.source is None:
        raise UserError("data.source: nothing to prepare from; name a corpus or files, or an existing data.store")
    tokenizer = load_tokenizer(config.tokenizer)
    _check_policy(config, tokenizer)
    with disk_errors(folder):
        is_there = (folder / HEADER).is_file()
    if not replace and is_there:
        clear_leftovers(folder)
        return _matching(folder, config, tokenizer)
    with exclusive(folder, say):
        if (folder / HEADER).is_file():
            if not replace:
                return _matching(folder, config, tokenizer)
        elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: something that is no token store lies there; it is left alone. Mend data.store")
        with written_whole(folder) as partial:
            _write(config, config.source, tokenizer, partial, say, progress, shard_tokens)
    return open_store(folder, tokenizer=tokenizer)


def ensure_store(
    config: DataConfig,
    *,
    is_leader: bool = True,
    barrier: Callable[[], None] = lambda: None,
    vocab_size: int | None = None,
    say: Say = print,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Store:
    """The store of the config, prepared from its source where it is absent.

    Of several processes the leader prepares and the others wait at ``barrier``, which every process reaches exactly
    once, a failing leader too.

    Raises:
      UserError: see ``prepare`` and ``open_store``; the store was made from something else than the config says; it
        holds ids that a model of ``vocab_size`` does not know; its files are not as they were written.
    """
    try:
        if is_leader and config.source is not None:
            prepare(config, say=say, progress=progress)
    finally:
        barrier()
    tokenizer = load_tokenizer(config.tokenizer)
    store = open_store(config.store, vocab_size=vocab_size, tokenizer=tokenizer)
    difference(store, config, tokenizer, with_files=False)
    left_out = store.verify(VERIFIED)
    if left_out and is_leader:
        say(
            f"{store.path}: {left_out / 2**30:.1f} GiB of tokens were not compared with their checksums; "
            "k3train data inspect --verify does it"
        )
    return store


def _matching(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> Store:
    store = open_store(folder)
    difference(store, config, tokenizer)
    return store


def _check_policy(config: DataConfig, tokenizer: Tokenizer) -> None:
    for key, wanted, id_ in (
        ("add_bos", config.add_bos, tokenizer.bos_id),
        ("add_eos", config.add_eos, tokenizer.eos_id),
    ):
        if wanted and id_ is None:
            raise UserError(
                f"data.{key}: the tokenizer {config.tokenizer.path} names no {key[4:].upper()} token. Set data.{key}: "
                f"false, or name it as {key[4:]}_token in a tokenizer_config.json beside it"
            )


def _write(
    config: DataConfig,
    source: SourceConfig,
    tokenizer: Tokenizer,
    partial: Path,
    say: Say,
    progress: Callable[[Progress], None],
    shard_tokens: int,
) -> None:
    """Read, tokenize, split and shuffle into ``partial``; the header last."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    skipped: Counter[str] = Counter()
    with ExitStack() as stack:
        train = Spool(partial / "train", dtype, with_bytes=False)
        stack.callback(train.close)
        held = Spool(partial / "held", dtype, with_bytes=True)
        stack.callback(held.close)
        skips = stack.enter_context((partial / SKIPS).open("w", encoding="utf-8"))
        origin, records = _read(source, say)
        total = sum(file.bytes for file in origin.files)
        for record, bytes_done in records:
            bad = record if isinstance(record, BadRecord) else _add(record, config, tokenizer, train, held)
            if bad is not None:
                if source.on_bad_record == "error":
                    raise UserError(f"{bad}. Mend the file, or set data.source.on_bad_record: skip")
                skipped[bad.kind] += 1
                skips.write(json.dumps({**bad.__dict__, "reason": bad.reason}, ensure_ascii=False) + "\n")
            progress(Progress(bytes_done, total, train.documents + held.documents))
        _check_sides(config, train, held, skipped)
        train_counts, train_files = train.finish(partial / "train", shard_tokens)
        held_counts, held_files = held.finish(partial / "holdout", shard_tokens)
    header = Header(
        dtype=dtype,
        shard_tokens=shard_tokens,
        tokenizer=TokenizerHeader(
            kind=tokenizer.kind,
            vocab_size=tokenizer.vocab_size,
            fingerprint=tokenizer.fingerprint,
            bos_id=tokenizer.bos_id,
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
        ),
        add_bos=config.add_bos,
        add_eos=config.add_eos,
        holdout=config.holdout,
        holdout_rule=HOLDOUT_RULE,
        shuffle_seed=config.shuffle_seed,
        source=origin,
        train=train_counts,
        holdout_split=held_counts,
        skipped=dict(sorted(skipped.items())),
        files=train_files + held_files,
    )
    (partial / HEADER).write_text(header.model_dump_json(indent=1), encoding="utf-8")


def _read(source: SourceConfig, say: Say) -> tuple[SourceHeader, Iterator[tuple[Document | BadRecord, int]]]:
    """What the source is, and its records, each with the bytes of whole files read before it."""
    if source.corpus is not None:
        corpus = get_corpus(source.corpus)
        archive = locate(corpus, say)
        files, licence = [archive], corpus.licence
        readers = [read_corpus(corpus, archive)]
    else:
        files, licence = find_files(source.files), "not stated"
        readers = [read_documents(file, source.text_field) for file in files]
    listed = [_source_file(file) for file in files]

    def records() -> Iterator[tuple[Document | BadRecord, int]]:
        done = 0
        for reader, file in zip(readers, listed, strict=True):
            for record in reader:
                yield record, done
            done += file.bytes

    header = SourceHeader(
        corpus=source.corpus,
        patterns=list(source.files),
        text_field=source.text_field,
        on_bad_record=source.on_bad_record,
        licence=licence,
        files=listed,
    )
    return header, records()


def _source_file(file: Path) -> SourceFile:
    try:
        stat = file.stat()
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
    return SourceFile(path=str(file), bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=sha256)


def _add(document: Document, config: DataConfig, tokenizer: Tokenizer, train: Spool, held: Spool) -> BadRecord | None:
    """Tokenize one document into its split; what is wrong with it, or None."""
    digest = hashlib.sha256(document.text.encode("utf-8")).digest()
    ids, token_bytes = tokenizer.encode_spans(document.text)
    if not len(ids):
        return BadRecord(
            document.file, document.line, document.offset, "no tokens", "the tokenizer makes nothing of it"
        )
    before = [tokenizer.bos_id] if config.add_bos else []
    after = [tokenizer.eos_id] if config.add_eos else []
    ids = np.concatenate([np.array(before, np.int32), ids, np.array(after, np.int32)])
    token_bytes = np.pad(token_bytes, (len(before), len(after)))
    spool = held if is_held_out(digest, config.holdout) else train
    spool.add(ids, token_bytes, digest, config.shuffle_seed, document)
    return None


def _check_sides(config: DataConfig, train: Spool, held: Spool, skipped: Counter[str]) -> None:
    if train.documents:
        return
    if held.documents:
        raise UserError(
            f"data.holdout {config.holdout}: all {held.documents} documents are held out and none is left to train on; "
            "lower data.holdout or bring more documents"
        )
    reasons = ", ".join(f"{count} {kind}" for kind, count in skipped.items())
    raise UserError(
        f"data.source: no documents are left ({sum(skipped.values())} records skipped: {reasons or 'none'})"
    )
