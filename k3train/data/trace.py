"""Which documents a sample holds: the way back from a bad batch to its text. Pure functions. Imports no JAX."""

from typing import NamedTuple

import numpy as np

from k3train.data.order import RowOrder
from k3train.data.store import Split


class RowTrace(NamedTuple):
    """One row of a batch and where it came from."""

    sample: int
    """Global sample number."""
    epoch: int
    row: int
    """Row of the token stream (``data/pack.py``)."""
    documents: tuple[int, ...]
    """Numbers of its documents in the store, in the row's order; the first may have begun in the row before."""
    origins: tuple[str, ...]
    """``file:line`` of each, where the store knows it; else empty."""


class Trace:
    """Looks samples up in a split, as the loader reads them."""

    def __init__(self, split: Split, order: RowOrder, sequence_length: int):
        self.split, self.order, self.sequence_length = split, order, sequence_length

    def rows(self, first: int, stop: int) -> list[RowTrace]:
        """The rows of samples [first, stop).

        Raises:
          UserError: exit 20, a sample lies past ``max_epochs``.
        """
        samples = np.arange(first, stop, dtype=np.int64)
        epochs, rows = self.order.row_of(samples)
        places = zip(samples.tolist(), epochs.tolist(), rows.tolist(), strict=True)
        return [self._trace(sample, epoch, row) for sample, epoch, row in places]

    def _trace(self, sample: int, epoch: int, row: int) -> RowTrace:
        documents = self.documents(row)
        origins = [self.split.origin(number) for number in documents]
        return RowTrace(sample, epoch, row, documents, tuple(f"{o.file}:{o.line}" for o in origins if o is not None))

    def documents(self, row: int) -> tuple[int, ...]:
        """Documents of a row, by their number in the split."""
        start = row * self.sequence_length
        stop = min(start + self.sequence_length, self.split.tokens)
        offsets = self.split.doc_offsets  # [documents + 1]
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        last = int(np.searchsorted(offsets, stop, side="left"))
        return tuple(range(first, last))
