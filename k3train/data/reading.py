"""What global sample k is: the row of one source, or of one of several by the mixture. Imports no JAX."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.batch import Batch
from k3train.data.config import DataConfig
from k3train.data.mixture import Mixture, derived_seed, mixture_of
from k3train.data.order import RowOrder
from k3train.data.pack import RowPlan


class Usage(NamedTuple):
    """How much of a source a run reads."""

    name: str
    rows: int
    """Rows there are."""
    read: int
    """Rows read, again and again counted each time."""
    max_epochs: int | None

    @property
    def epochs(self) -> float:
        """How often the source is read."""
        return self.read / self.rows


class Reading:
    """Rows by global sample number; the same whoever asks, and when.

    Args:
      plans: rows of each source, in the order of ``mixture.names``; one without a mixture.
      orders: order of each, likewise.
      mixture: which source a sample is of; None where there is one.
    """

    def __init__(self, plans: Sequence[RowPlan], orders: Sequence[RowOrder], mixture: Mixture | None = None):
        self.plans, self.orders, self.mixture = tuple(plans), tuple(orders), mixture
        self.names = mixture.names if mixture else ("",)
        self.rows = sum(order.rows for order in self.orders)
        """Rows of all sources."""

    def where(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source by its place in ``names``, epoch of the source, row of its plan) of samples, int64 [len] each.

        Raises:
          UserError: exit 20, a sample lies past ``max_epochs``.
        """
        samples = np.atleast_1d(np.asarray(samples, np.int64))
        if len(samples):
            self.check(int(samples.max()) + 1)
        if self.mixture is None:
            return np.zeros_like(samples), *self.orders[0].row_of(samples)
        sources, numbers = self.mixture.where(samples)
        epochs, rows = np.empty_like(samples), np.empty_like(samples)
        for source, order in enumerate(self.orders):
            own = sources == source
            epochs[own], rows[own] = order.row_of(numbers[own])
        return sources, epochs, rows

    def cut(self, samples: np.ndarray) -> Batch:
        """The rows of samples, [len, S]."""
        sources, _, rows = self.where(samples)
        if self.mixture is None:
            return self.plans[0].cut(rows)
        present = np.unique(sources)
        parts = [(sources == source, self.plans[source].cut(rows[sources == source])) for source in present]
        if len(parts) == 1:
            return parts[0][1]
        whole = Batch(*(np.empty((len(rows), *array.shape[1:]), array.dtype) for array in parts[0][1]))
        for own, batch in parts:
            for to, array in zip(whole, batch, strict=True):
                to[own] = array
        return whole

    def cut_at(self, position: int, rows: int, length: int) -> Batch:
        """Rows one after the other from a position of a run on (``data/course.py``), [rows, length].

        Args:
          position: a multiple of ``length``.
          rows: how many.
          length: L, a divisor of the plans' S; shorter rows are parts of whole ones, their documents counted anew.
        """
        parts = self.length // length
        samples, part = np.divmod(position // length + np.arange(rows, dtype=np.int64), parts)
        if parts == 1:
            return self.cut(samples)
        present, which = np.unique(samples, return_inverse=True)
        whole = self.cut(present)
        batch = Batch(*(array.reshape(len(present), parts, length)[which, part] for array in whole))
        documents = batch.segment_ids
        return batch._replace(segment_ids=np.where(documents > 0, documents - documents[:, :1] + 1, documents))

    @property
    def length(self) -> int:
        """S, tokens of a whole row."""
        return self.plans[0].sequence_length

    @cached_property
    def _end(self) -> tuple[int, int] | None:
        """(samples there are, source that is used up then); None where all may be read again and again."""
        ends = []
        for source, order in enumerate(self.orders):
            if order.samples is not None:
                end = self.mixture.sample_of(source, order.samples) if self.mixture else order.samples
                if end is not None:
                    ends.append((end, source))
        return min(ends, default=None)

    @property
    def samples(self) -> int | None:
        """Samples there are in all; None where the data may be read again and again."""
        return self._end[0] if self._end else None

    def check(self, stop: int) -> None:
        """Raise UserError (exit 20) where samples up to ``stop`` are more than there are."""
        if self.mixture is None:
            self.orders[0].check(stop)
        elif self._end is not None and stop > self._end[0]:
            end, source = self._end
            name, order = self.names[source], self.orders[source]
            raise UserError(
                f"source {name} is used up: sample {stop - 1} was asked for, and after {end} samples all "
                f"{order.max_epochs} epoch(s) of its {order.rows} rows are read. Raise data.sources.{name}.max_epochs, "
                "lower its weight in data.mixture, train fewer steps or prepare more text",
                ExitCode.DATA_EXHAUSTED,
            )

    def usage(self, samples: int) -> list[Usage]:
        """What the first ``samples`` samples read of each source, past its end too."""
        read = self.mixture.read(samples).tolist() if self.mixture else [samples]
        parts = zip(self.names, self.orders, read, strict=True)
        return [Usage(name, order.rows, count, order.max_epochs) for name, order, count in parts]


def reading_of(plans: RowPlan | Mapping[str, RowPlan], config: DataConfig, seed: int) -> Reading:
    """The rows that a data section names, in its order.

    Args:
      plans: of the one store, or of each source by name (``data/rows.py``).
      config: mixture and ``max_epochs``.
      seed: key of the order.

    Raises:
      UserError: there is no row in a source.
    """
    if config.mixture is None:
        plan = plans if isinstance(plans, RowPlan) else plans[""]
        return Reading([plan], [RowOrder(plan.rows, seed, config.max_epochs)])
    assert not isinstance(plans, RowPlan) and config.sources is not None
    mixture = mixture_of(config, seed, {name: plan.rows for name, plan in plans.items()})
    assert mixture is not None
    orders = [
        RowOrder(plans[name].rows, derived_seed(seed, f"source {name}"), config.sources[name].max_epochs)
        for name in mixture.names
    ]
    return Reading([plans[name] for name in mixture.names], orders, mixture)
