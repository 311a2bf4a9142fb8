"""Held-out text as batches: every held-out token is scored exactly once. Imports no JAX.

Rows are concat-and-chunk, however training packs them, in order, and the last one is padded; so a document that runs
over the end of a row goes on in the next without its left context.

Convention of bits per byte = nats / ln 2 / ``source_bytes``: nats are summed over all supervised targets, EOS included;
bytes are the UTF-8 bytes of the text that those targets stand for, so BOS and EOS count none. With BOS every byte of
every document is a target; without it, the first token of a document is neither scored nor counted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from k3train.config.errors import UserError
from k3train.data.batch import Batch
from k3train.data.pack import Chunks
from k3train.data.store import Store
from k3train.data.stores import Stores


@dataclass(frozen=True)
class Holdout:
    """Batches over the held-out side of one store, and what they score in all (over all processes)."""

    store: Store
    sequence_length: int
    batch: int
    """Rows of a global batch."""
    rows: int
    """Rows with held-out tokens; the last batch is filled up with rows of padding."""
    supervised: int
    """Targets scored."""
    source_bytes: int
    """Bytes of text that they stand for."""
    part: int = 0
    parts: int = 1

    def __len__(self) -> int:
        return -(-self.rows // self.batch)

    def __iter__(self) -> Iterator[Batch]:
        share = self.batch // self.parts
        plan = Chunks(self.store.holdout, self.sequence_length, self.store.pad_id)
        for index in range(len(self)):
            first = index * self.batch + self.part * share
            rows = np.arange(first, first + share)
            # Rows past the limit are pushed past the end of the split, where rows are padding.
            rows = np.where(rows < self.rows, rows, self.store.holdout.tokens + rows)
            yield plan.cut(rows)


@dataclass(frozen=True)
class Holdouts:
    """Batches over the held-out sides of all sources, one after the other; each begins a batch of its own."""

    parts: dict[str, Holdout]
    """By the source's name, in their order; under an empty name where there is one."""

    @property
    def supervised(self) -> int:
        """Targets scored."""
        return sum(part.supervised for part in self.parts.values())

    @property
    def source_bytes(self) -> int:
        """Bytes of text that they stand for."""
        return sum(part.source_bytes for part in self.parts.values())

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __iter__(self) -> Iterator[Batch]:
        return chain.from_iterable(self.parts.values())


def holdouts(
    stores: Stores, sequence_length: int, batch: int, max_rows: int | None = None, *, part: int = 0, parts: int = 1
) -> Holdouts:
    """Held-out documents of all sources by name; sources that hold out none are passed over.

    Args:
      max_rows: read only the first so many rows of each source.

    Raises:
      UserError: no source holds out anything; otherwise like :func:`holdout_batches`.
    """
    some = {name: store for name, store in stores.by_name.items() if store.holdout.tokens > 1}
    chosen = some or dict(list(stores.by_name.items())[:1])
    place = {"part": part, "parts": parts}
    return Holdouts(
        {name: holdout_batches(store, sequence_length, batch, max_rows, **place) for name, store in chosen.items()}
    )


def holdout_batches(
    store: Store,
    sequence_length: int,
    batch: int,
    max_rows: int | None = None,
    *,
    part: int = 0,
    parts: int = 1,
) -> Holdout:
    """Batches of [batch / parts, sequence_length] over the held-out documents, with exact totals.

    Args:
      store: an opened store.
      sequence_length: S.
      batch: rows of a global batch; part p has rows [p*B/P, (p+1)*B/P) of each.
      max_rows: read only the first so many rows.
      part: p.
      parts: P, which divides ``batch``.

    Raises:
      UserError: nothing is held out, or P does not divide the batch.
    """
    split = store.holdout
    if split.tokens < 2:
        raise UserError(
            f"{store.path}: no document is held out (data.holdout {store.header.holdout} of {store.train.documents} "
            "documents), and evaluation needs some; raise data.holdout and prepare the store anew"
        )
    if batch % parts:
        raise UserError(f"evaluation rows {batch} do not divide into {parts} parts")
    rows = -(-(split.tokens - 1) // sequence_length)
    rows = rows if max_rows is None else min(rows, max_rows)
    scored = min(rows * sequence_length + 1, split.tokens)  # tokens read; all but document starts are targets
    offsets = np.asarray(split.doc_offsets)
    is_target = np.ones(scored, bool)
    is_target[offsets[:-1][offsets[:-1] < scored]] = False
    hidden = np.zeros(scored, bool)
    split.mask(0, scored, hidden)
    is_target &= ~hidden
    source_bytes = int(split.token_bytes[:scored][is_target].sum(dtype=np.int64))
    return Holdout(
        store=store,
        sequence_length=sequence_length,
        batch=batch,
        rows=rows,
        supervised=int(is_target.sum()),
        source_bytes=source_bytes,
        part=part,
        parts=parts,
    )
