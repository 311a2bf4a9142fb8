"""Rows of a token stream, with documents as segments. Imports no JAX.

A plan says which stretches of tokens a row holds. A row of S inputs has S targets, so it takes S + 1 tokens: the last
one is a target only. This plan is concat-and-chunk; ``data/best_fit.py`` has the other.
"""

from abc import ABC, abstractmethod

import numpy as np

from k3train.config.errors import UserError
from k3train.data.batch import Batch
from k3train.data.store import Split


class RowPlan(ABC):
    """How a split is cut into rows of ``sequence_length`` (S) tokens; row r is the same whoever asks, and when.

    Args:
      split: the token stream.
      sequence_length: S.
      pad_id: token id that fills padding.
    """

    def __init__(self, split: Split, sequence_length: int, pad_id: int = 0):
        self.split, self.sequence_length, self.pad_id = split, sequence_length, pad_id

    @property
    @abstractmethod
    def rows(self) -> int:
        """Rows there are."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """One line for a person: rows, and what they leave out or fill up."""

    @abstractmethod
    def stretches(self, row: int) -> list[tuple[int, int]]:
        """Tokens [start, stop) of the split that a row holds one after the other, at most S + 1 in all."""

    def number(self, start: int, stop: int, before: int, to: np.ndarray) -> int:
        """Numbers the documents of a stretch [start, stop) on from ``before`` into ``to``; the last number."""
        offsets = self.split.doc_offsets  # [documents + 1]
        first = int(np.searchsorted(offsets, start, side="right"))
        last = int(np.searchsorted(offsets, stop, side="left"))
        to[0] = before + 1
        to[1:] = 0
        to[np.asarray(offsets[first:last]) - start] = 1
        np.cumsum(to, out=to)
        return int(to[-1])

    def refuse_short(self) -> None:
        """Raise UserError where all tokens are fewer than one row."""
        if self.split.tokens <= self.sequence_length:
            raise UserError(
                f"{self.split.folder}: {self.split.tokens} tokens are fewer than one row (data.sequence_length "
                f"{self.sequence_length} + 1); prepare more text or shorten the row"
            )

    def within(self, row: int, first: int, stop: int) -> list[tuple[int, int]]:
        """:meth:`stretches` as far as they lie among the inputs [first, stop) of a row."""
        found, at = [], 0
        for begin, end in self.stretches(row):
            here, there = begin + max(first - at, 0), min(end, begin + stop - at)
            at += end - begin
            if here < there:
                found.append((here, there))
        return found

    def documents(self, row: int, first: int = 0, stop: int | None = None) -> tuple[int, ...]:
        """Documents among the inputs [first, stop) of a row, by their number in the split, in the row's order."""
        found, offsets = [], self.split.doc_offsets  # [documents + 1]
        for begin, end in self.within(row, first, self.sequence_length if stop is None else stop):
            document = int(np.searchsorted(offsets, begin, side="right")) - 1
            found += range(document, int(np.searchsorted(offsets, end, side="left")))
        return tuple(found)

    def cut(self, rows: np.ndarray) -> Batch:
        """The named rows, [len(rows), S]; what a row does not fill is padding (segment 0, no loss).

        Args:
          rows: int64 [n] row numbers.
        """
        shape = (len(rows), self.sequence_length + 1)
        tokens = np.full(shape, self.pad_id, np.int32)  # [n, S+1]
        segments = np.zeros(shape, np.int32)  # [n, S+1]
        hidden = np.zeros(shape, bool) if len(self.split.masked) else None  # [n, S+1]
        for i, row in enumerate(np.asarray(rows, np.int64).tolist()):
            at = documents = start = 0
            for start, stop in self.stretches(row):
                end = at + stop - start
                self.split.copy(start, stop, tokens[i, at:end])
                documents = self.number(start, stop, documents, segments[i, at:end])
                if hidden is not None:
                    self.split.mask(start, stop, hidden[i, at:end])
                at = end
            self.split.check(tokens[i, :at], start)
        inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        # A row may end before S: its last token has no target, but it is a token of its document.
        return Batch(
            tokens=np.ascontiguousarray(tokens[:, :-1]),
            targets=np.where(inside, tokens[:, 1:], np.int32(0)),
            segment_ids=np.ascontiguousarray(segments[:, :-1]),
            loss_mask=inside if hidden is None else inside & ~hidden[:, 1:],
        )


class Chunks(RowPlan):
    """Concat-and-chunk: row r is tokens [rS, rS + S + 1) of the split.

    A document that is longer than the row goes on in the next one. What is left at the end and does not fill a row is
    not trained on; a row past the end is padded.
    """

    @property
    def rows(self) -> int:
        """Whole rows in the split.

        Raises:
          UserError: there is not even one.
        """
        self.refuse_short()
        return (self.split.tokens - 1) // self.sequence_length

    @property
    def dropped(self) -> int:
        """Tokens at the end that fill no row."""
        return self.split.tokens - 1 - self.rows * self.sequence_length

    @property
    def summary(self) -> str:
        """Rows, and what is left out."""
        return f"{self.rows:,} rows of {self.sequence_length:,} tokens; {self.dropped:,} at the end fill none"

    def stretches(self, row: int) -> list[tuple[int, int]]:
        """One, or none past the end."""
        start = min(row * self.sequence_length, self.split.tokens)
        stop = min(start + self.sequence_length + 1, self.split.tokens)
        return [(start, stop)] if stop > start else []
