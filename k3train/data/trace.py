"""Which documents a sample holds: the way back from a bad batch to its text. Pure functions. Imports no JAX."""

from typing import NamedTuple

import numpy as np

from k3train.data.reading import Reading


class RowTrace(NamedTuple):
    """One row of a batch and where it came from."""

    sample: int
    """Global sample number of the whole row."""
    epoch: int
    row: int
    """Row of the plan (``data/pack.py``)."""
    documents: tuple[int, ...]
    """Numbers of its documents in the store, in the row's order; the first may have begun in the row before."""
    origins: tuple[str, ...]
    """``file:line`` of each, where the store knows it; else empty."""
    source: str = ""
    """Name of its source, where there are several."""
    first_token: int = 0
    """Token of the whole row with which it begins: not 0 where a curriculum cuts rows into parts."""


class Trace:
    """Looks samples up in the rows of a run, as the loader reads them."""

    def __init__(self, reading: Reading):
        self.reading = reading

    def rows(self, position: int, rows: int, length: int) -> list[RowTrace]:
        """The rows that :meth:`~k3train.data.reading.Reading.cut_at` cuts there.

        Raises:
          UserError: exit 20, a row lies past ``max_epochs``.
        """
        parts = position // length + np.arange(rows, dtype=np.int64)
        samples, part = np.divmod(parts, self.reading.length // length)
        places = zip(samples, *self.reading.where(samples), part * length, strict=True)
        return [self._trace(length, *map(int, place)) for place in places]

    def _trace(self, length: int, sample: int, source: int, epoch: int, row: int, first: int) -> RowTrace:
        plan = self.reading.plans[source]
        documents = plan.documents(row, first, first + length)
        origins = (plan.split.origin(number) for number in documents)
        known = tuple(f"{o.file}:{o.line}" for o in origins if o is not None)
        return RowTrace(sample, epoch, row, documents, known, self.reading.names[source], first)
