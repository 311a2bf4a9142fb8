"""A store as a person reads it: counts, and rows with their documents, specials and padding. Imports no JAX."""

import json
import shutil
import sys
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from k3train.data.batch import Batch
from k3train.data.config import DataConfig
from k3train.data.course import Course
from k3train.data.fill_in_middle import stored_names
from k3train.data.mixture import mixture_of
from k3train.data.pack import Chunks, RowPlan
from k3train.data.reading import Reading, reading_of
from k3train.data.rows import plans_of
from k3train.data.store import SKIPS, Store
from k3train.data.stores import Stores
from k3train.data.tokenizer import Tokenizer
from k3train.data.trace import Trace

_STYLES = ("cyan", "green", "magenta", "yellow", "blue")


def console() -> Console:
    """Standard output, with colour only on a terminal, and as wide as the terminal or 120 columns."""
    return Console(file=sys.stdout, highlight=False, markup=False, width=shutil.get_terminal_size((120, 24)).columns)


def report(store: Store, out: Console) -> None:
    """Exact counts of a store and where its text came from."""
    header = store.header
    table = Table("", "documents", "tokens", "bytes of text", "ids", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in (("train", header.train), ("holdout", header.holdout_split)):
        ids = f"{counts.min_id}..{counts.max_id}" if counts.tokens else "none"
        text = "not counted" if header.token_files and name == "train" else f"{counts.source_bytes:,}"
        table.add_row(name, f"{counts.documents:,}", f"{counts.tokens:,}", text, ids)
    out.print(
        f"token store {store.path}, {header.dtype[1:].replace('u2', 'uint16').replace('u4', 'uint32')} ids",
        soft_wrap=True,
    )
    out.print(table)
    tokenizer = header.tokenizer
    out.print(
        f"tokenizer {tokenizer.kind}, {tokenizer.vocab_size} ids, fingerprint {tokenizer.fingerprint[:12]}; "
        f"BOS {'added' if header.add_bos else 'not added'}, EOS {'added' if header.add_eos else 'not added'}",
        soft_wrap=True,
    )
    if (middle := header.fill_in_middle) is not None:
        out.print(
            f"fill in the middle: {middle.rate:g} of the training documents, {middle.spm_rate:g} of them suffix first; "
            f"cut at a {middle.boundaries}, seed {middle.seed}",
            soft_wrap=True,
        )
    source = header.source
    what = (
        f"corpus {source.corpus}" if source.corpus else f"{len(source.files)} file(s) of {', '.join(source.patterns)}"
    )
    out.print(
        f"source: {what}; licence: {source.licence}; holdout {header.holdout:g}, shuffle seed {header.shuffle_seed}",
        soft_wrap=True,
    )
    if header.token_files:
        size = sum(file.bytes for file in header.token_files) / 2**30
        out.print(f"tokens are read where they lie: {len(header.token_files)} file(s), {size:.2f} GiB", soft_wrap=True)
    if header.duplicates:
        out.print(f"left out {header.duplicates:,} duplicates", soft_wrap=True)
    if header.skipped:
        reasons = ", ".join(f"{count} {kind}" for kind, count in header.skipped.items())
        out.print(
            f"skipped {sum(header.skipped.values())} records ({reasons}); each is a line of {store.path / SKIPS}",
            soft_wrap=True,
        )
    else:
        out.print("skipped nothing")
    if header.holdout_split.documents == 0:
        out.print("nothing is held out: an evaluation has no text; raise data.holdout")


def show_mixture(config: DataConfig, rows: Mapping[str, int], out: Console) -> None:
    """Print how many rows of each source a block has in each phase, and how many there are; nothing of one source."""
    mixture = mixture_of(config, config.shuffle_seed)
    if mixture is None:
        return
    starts = [f"from sample {first * mixture.block:,}" for first in mixture.firsts.tolist()]
    table = Table("source", "rows", *starts, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, counts in zip(mixture.names, mixture.counts.T.tolist(), strict=True):
        table.add_row(name, f"{rows[name]:,}", *(f"{count:,}" for count in counts))
    out.print(f"each block of {mixture.block:,} samples has so many rows of each source:")
    out.print(table)


def show_course(course: Course, out: Console) -> None:
    """Print what steps take from where on; nothing where all take the same."""
    if len(course.legs) == 1:
        return
    table = Table("from step", "from tokens", "rows", "of tokens", "microbatches", "a step", box=None)
    for column in table.columns:
        column.justify = "right"
    for leg in course.legs:
        values = leg.step + 1, leg.tokens, leg.rows, leg.length, leg.accumulation, leg.step_tokens
        table.add_row(*(f"{value:,}" for value in values))
    out.print(table)


def usage_table(reading: Reading, samples: int) -> Table:
    """How often ``samples`` samples read each source, and where one is used up before them."""
    end = reading.samples
    note = None if end is None or end >= samples else f"the data is used up after {end:,} of {samples:,} samples"
    table = Table("source", "rows", "rows read", "epochs", "max_epochs", title="sources at the end", caption=note)
    for column in table.columns[1:]:
        column.justify = "right"
    for use in reading.usage(samples):
        most = "none" if use.max_epochs is None else str(use.max_epochs)
        table.add_row(use.name, f"{use.rows:,}", f"{use.read:,}", f"{use.epochs:.2f}", most)
    return table


def show_rows(
    stores: Stores,
    tokenizer: Tokenizer | None,
    out: Console,
    config: DataConfig,
    *,
    rows: int,
    sample: int,
    holdout: bool,
) -> None:
    """Print rows: of training from global sample ``sample`` on, or held-out rows in their order, source by source.

    Without a tokenizer ids are printed instead of text.

    Args:
      config: packing, length of rows, seed, and the mixture of several sources; epochs are not limited.
    """
    if holdout:
        for title, name, plan, row in _held_out_rows(stores, config.sequence_length, sample, sample + rows):
            _show_row(stores, tokenizer, out, title, name, plan, row, plan.cut(np.array([row])))
    else:
        length = config.sequence_length
        show_training_rows(stores, tokenizer, out, config, position=sample * length, rows=rows, length=length)


def show_training_rows(
    stores: Stores,
    tokenizer: Tokenizer | None,
    out: Console,
    config: DataConfig,
    *,
    position: int,
    rows: int,
    length: int,
) -> None:
    """Print rows of training from a position on (``data/course.py``); otherwise like :func:`show_rows`."""
    plans = plans_of(stores, config.packing, config.sequence_length, out.print)
    reading = reading_of(plans, config.without_limits(), config.shuffle_seed)
    for name, plan in plans.items():
        out.print(f"{name}: {plan.summary}" if name else plan.summary)
    show_mixture(config, {name: plan.rows for name, plan in plans.items()}, out)
    batch = reading.cut_at(position, rows, length)
    for number, found in enumerate(Trace(reading).rows(position, rows, length)):
        plan = plans[found.source]
        part = "" if length == reading.length else f", from token {found.first_token} on"
        where = f"{_of(found.source)}epoch {found.epoch}, row {found.row} of {plan.rows}{part}"
        row = Batch(*(array[number : number + 1] for array in batch))
        title = f"sample {found.sample} ({where})"
        _show_row(stores, tokenizer, out, title, found.source, plan, found.row, row, found.first_token)


def _show_row(
    stores: Stores,
    tokenizer: Tokenizer | None,
    out: Console,
    title: str,
    name: str,
    plan: RowPlan,
    row: int,
    batch: Batch,
    first: int = 0,
) -> None:
    """Print one row, or the part of it from token ``first`` on that the batch holds."""
    out.rule(_title(title, batch))
    out.print(_sources(plan, row, first, first + batch.tokens.shape[1]), soft_wrap=True)
    out.print(_row_text(batch, stores.by_name[name], tokenizer, marks=out.color_system is None), soft_wrap=True)


def _of(source: str) -> str:
    return f"{source}, " if source else ""


def _held_out_rows(stores: Stores, sequence_length: int, first: int, stop: int) -> list[tuple[str, str, RowPlan, int]]:
    """(title, source, plan, row) of held-out rows [first, stop), counted through the sources."""
    places, before = [], 0
    for name, store in stores.by_name.items():
        plan = Chunks(store.holdout, sequence_length, store.pad_id)
        total = -(-max(store.holdout.tokens - 1, 0) // sequence_length)
        for row in range(max(first - before, 0), min(stop - before, total)):
            places.append((f"held-out row {row}{f' of {name}' if name else ''}", name, plan, row))
        before += total
    return places


def _title(name: str, batch: Batch) -> str:
    padding, masked = int((batch.segment_ids == 0).sum()), int(_masked(batch).sum())
    parts = [name, f"{int(batch.segment_ids.max())} document(s)", f"{int(batch.loss_mask.sum())} targets"]
    parts += [f"{masked} masked"] if masked else []
    return ", ".join([*parts, f"{padding} padding"] if padding else parts)


def _masked(batch: Batch) -> np.ndarray:
    """Which tokens of the only row go on with a document but are no target of the loss, bool [S]."""
    segments = batch.segment_ids[0]
    masked = np.zeros(len(segments), bool)
    masked[1:] = (segments[1:] == segments[:-1]) & (segments[1:] > 0) & ~batch.loss_mask[0, :-1]
    return masked


def _sources(plan: RowPlan, row: int, first: int, last: int) -> Text:
    """A line for each document among tokens [first, last) of a row: where it came from, which of its tokens are here,
    its metadata."""
    split, text = plan.split, Text()
    offsets = split.doc_offsets
    lines = []
    for start, stop in plan.within(row, first, last):
        number = int(np.searchsorted(offsets, start, side="right")) - 1
        for document in range(number, int(np.searchsorted(offsets, stop, side="left"))):
            begin, end = offsets[document : document + 2].tolist()
            lines.append((document, max(start, begin) - begin, min(stop, end) - begin, end - begin))
    for number, (document, begin, end, tokens) in enumerate(lines, 1):
        origin, metadata = split.origin(document), split.metadata(document)
        where = f"{origin.file}:{origin.line}" if origin else "origin not known"
        part = f"{tokens:,} tokens" if (begin, end) == (0, tokens) else f"tokens {begin:,} to {end:,} of {tokens:,}"
        about = f"  {json.dumps(metadata, ensure_ascii=False)}" if metadata else ""
        text.append(f"■ {number} ", style=_STYLES[(number - 1) % len(_STYLES)])
        text.append(_printable(f"{where}  document {document:,}, {part}{about}"), style="dim")
        text.append("\n" if number < len(lines) else "")
    return text


def _row_text(batch: Batch, store: Store, tokenizer: Tokenizer | None, *, marks: bool) -> Text:
    """One row: documents in changing colours with a mark between them, specials named, padding counted.

    Masked tokens are dimmed, and stand in ⟦⟧ where there are no colours (``marks``).
    """
    tokens, segments, masked = batch.tokens[0], batch.segment_ids[0], _masked(batch)
    text = Text()
    for segment in range(1, int(segments.max()) + 1):
        style = _STYLES[(segment - 1) % len(_STYLES)]
        if segment > 1:
            text.append("\n┄┄┄┄ next document ┄┄┄┄\n", style="dim")
        ids, hidden = tokens[segments == segment], masked[segments == segment]
        bounds = [0, *(np.flatnonzero(np.diff(hidden)) + 1).tolist(), len(ids)]
        for start, stop in pairwise(bounds):
            part = _readable(ids[start:stop], store, tokenizer)
            if hidden[start]:
                text.append(f"⟦{part}⟧" if marks else part, style=f"dim {style}")
            else:
                text.append(part, style=style)
    padding = int((segments == 0).sum())
    if padding:
        text.append(f"\n‹padding x {padding}›", style="dim")
    return text


def _readable(ids: np.ndarray, store: Store, tokenizer: Tokenizer | None) -> str:
    made_by = store.header.tokenizer
    names = {made_by.bos_id: "‹bos›", made_by.eos_id: "‹eos›"} | stored_names(store.header.fill_in_middle)
    special = np.flatnonzero(np.isin(ids, [id_ for id_ in names if id_ is not None]))
    parts, start = [], 0
    for place in [*special.tolist(), len(ids)]:
        plain = ids[start:place]
        if len(plain):
            parts.append(tokenizer.decode(plain) if tokenizer else " ".join(map(str, plain.tolist())))
        if place < len(ids):
            parts.append(names[int(ids[place])])
        start = place + 1
    return _printable("".join(parts))


def _printable(text: str) -> str:
    """Control characters would move the terminal's cursor; line ends and tabs are wanted."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
