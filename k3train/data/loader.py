"""Training batches: this process's rows of each global batch, read ahead by Grain. The only room that needs Grain.

The position is one integer, the global sample number. Batch at sample k0 = samples [k0, k0 + B), a pure function of
(row plans, mixture, seed, k0), so that any number of processes, and a start anywhere, read the same global batches.
"""

import sys
from collections.abc import Iterator, Mapping

import grain
import numpy as np

from k3train.config.errors import UserError
from k3train.data.batch import Batch
from k3train.data.config import DataConfig
from k3train.data.pack import RowPlan
from k3train.data.reading import Reading, reading_of
from k3train.data.trace import Trace


class Loader(Iterator[Batch]):
    """Host-local batches, each array [global_batch / parts, sequence_length], from ``start_sample`` on.

    ``sample`` is the global sample number that the next batch begins with: the whole state of the loader.
    """

    def __init__(
        self,
        plans: RowPlan | Mapping[str, RowPlan],
        config: DataConfig,
        global_batch: int,
        seed: int,
        part: int = 0,
        parts: int = 1,
        start_sample: int = 0,
    ):
        """Open the loader.

        Args:
          plans: the rows, of one store or of each source by name (``data/rows.py``).
          config: the data section (mixture, epochs, prefetch).
          global_batch: B, rows of one optimizer step over all processes.
          seed: key of the order.
          part: p; this process reads rows [p*B/P, (p+1)*B/P) of each global batch (``distributed.Feed``).
          parts: P, which divides B.
          start_sample: global sample number to begin with; any, at the same cost.

        Raises:
          UserError: P does not divide B, or there is no row.
        """
        if global_batch % parts:
            raise UserError(f"train.global_batch {global_batch} does not divide into {parts} parts")
        self.reading = reading_of(plans, config, seed)
        self.trace = Trace(self.reading)
        self.global_batch = global_batch
        self.sample = start_sample
        source = _Batches(self.reading, global_batch, part, parts, start_sample)
        # More threads than one only wait for each other on a mapped file.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=config.prefetch)
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    @property
    def epoch(self) -> float:
        """How often the data has been read up to ``sample``: rows read over the rows of all sources."""
        return self.sample / self.reading.rows

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
          UserError: exit 20 where ``max_epochs`` holds no whole batch any more, on every process at the same batch.
        """
        self.reading.check(self.sample + self.global_batch)
        batch = next(self._batches)
        self.sample += self.global_batch
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()


class _Batches:
    """Random-access source for Grain: item i is this process's share of the i-th global batch after the start."""

    def __init__(self, reading: Reading, global_batch: int, part: int, parts: int, start_sample: int):
        self.reading = reading
        self.share = global_batch // parts
        self.global_batch = global_batch
        self.first = start_sample + part * self.share
        left = sys.maxsize if reading.samples is None else reading.samples - start_sample
        self.batches = max(0, min(left // global_batch, sys.maxsize))

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index) -> Batch:
        start = self.first + int(index) * self.global_batch
        return self.reading.cut(np.arange(start, start + self.share, dtype=np.int64))
