"""Which documents a sample holds: the way back from a bad batch to its text. Pure functions. Imports no JAX."""

from typing import NamedTuple

import numpy as np

from k3train.data.order import RowOrder
from k3train.data.pack import RowPlan


class RowTrace(NamedTuple):
    """One row of a batch and where it came from."""

    sample: int
    """Global sample number."""
    epoch: int
    row: int
    """Row of the plan (``data/pack.py``)."""
    documents: tuple[int, ...]
    """Numbers of its documents in the store, in the row's order; the first may have begun in the row before."""
    origins: tuple[str, ...]
    """``file:line`` of each, where the store knows it; else empty."""


class Trace:
    """Looks samples up in a row plan, as the loader reads them."""

    def __init__(self, plan: RowPlan, order: RowOrder):
        self.plan, self.order = plan, order

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
        documents = self.plan.documents(row)
        origins = [self.plan.split.origin(number) for number in documents]
        return RowTrace(sample, epoch, row, documents, tuple(f"{o.file}:{o.line}" for o in origins if o is not None))
