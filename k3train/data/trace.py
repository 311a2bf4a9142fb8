"""Which documents a sample holds: the way back from a bad batch to its text. Pure functions. Imports no JAX."""

from typing import NamedTuple

import numpy as np

from k3train.data.reading import Reading


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
    source: str = ""
    """Name of its source, where there are several."""


class Trace:
    """Looks samples up in the rows of a run, as the loader reads them."""

    def __init__(self, reading: Reading):
        self.reading = reading

    def rows(self, first: int, stop: int) -> list[RowTrace]:
        """The rows of samples [first, stop).

        Raises:
          UserError: exit 20, a sample lies past ``max_epochs``.
        """
        samples = np.arange(first, stop, dtype=np.int64)
        places = zip(samples.tolist(), *(found.tolist() for found in self.reading.where(samples)), strict=True)
        return [self._trace(sample, source, epoch, row) for sample, source, epoch, row in places]

    def _trace(self, sample: int, source: int, epoch: int, row: int) -> RowTrace:
        plan = self.reading.plans[source]
        documents = plan.documents(row)
        origins = (plan.split.origin(number) for number in documents)
        known = tuple(f"{o.file}:{o.line}" for o in origins if o is not None)
        return RowTrace(sample, epoch, row, documents, known, self.reading.names[source])
