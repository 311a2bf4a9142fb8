"""Training batches: this process's rows of each global batch, read ahead by Grain. The only room that needs Grain.

A batch is a pure function of (row plans, mixture, seed, position, rows, length), so that any number of processes, and a
start anywhere, read the same global batches; ``data/course.py`` says which a step takes.
"""

import sys
from collections.abc import Iterator, Mapping

import grain

from k3train.config.errors import UserError
from k3train.data.batch import Batch
from k3train.data.config import DataConfig
from k3train.data.course import Course
from k3train.data.pack import RowPlan
from k3train.data.reading import Reading, reading_of
from k3train.data.trace import Trace


class Loader(Iterator[Batch]):
    """Host-local batches, each array [rows / parts, length], from the course's beginning on.

    ``step``, the number of steps whose batches were given, is the whole state of the loader.
    """

    def __init__(
        self,
        plans: RowPlan | Mapping[str, RowPlan],
        config: DataConfig,
        course: Course,
        seed: int,
        part: int = 0,
        parts: int = 1,
    ):
        """Open the loader.

        Args:
          plans: the rows, of one store or of each source by name (``data/rows.py``).
          config: the data section (mixture, epochs, prefetch).
          course: rows of each step, from the first that is asked for; a beginning far on costs no more.
          seed: key of the order.
          part: p; this process reads rows [p*B/P, (p+1)*B/P) of each global batch of B (``distributed.Feed``).
          parts: P, which divides every B.

        Raises:
          UserError: P does not divide a batch, or there is no row.
        """
        for leg in course.legs:
            if leg.rows % parts:
                raise UserError(f"a global batch of {leg.rows} rows does not divide into {parts} parts")
        self.reading = reading_of(plans, config, seed)
        self.trace = Trace(self.reading)
        self.course, self.step = course, course.legs[0].step
        source = _Batches(self.reading, course, part, parts)
        # More threads than one only wait for each other on a mapped file.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=config.prefetch)
        self._batches = iter(grain.MapDataset.source(source).to_iter_dataset(options))

    @property
    def position(self) -> int:
        """Where the rows given so far end."""
        return self.course.position(self.step)

    @property
    def epochs(self) -> dict[str, float]:
        """How often the data has been read: rows read over rows there are, of all sources under ``""``, and of each of
        several by its name."""
        rows = self.position / self.reading.length
        found = {"": rows / self.reading.rows}
        if self.reading.mixture is not None:
            found |= {use.name: use.epochs for use in self.reading.usage(int(rows))}
        return found

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
          UserError: exit 20 where ``max_epochs`` holds no whole batch any more, on every process at the same batch.
        """
        self.reading.check(-(-self.course.position(self.step + 1) // self.reading.length))
        batch = next(self._batches)
        self.step += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        self._batches.close()


class _Batches:
    """Random-access source for Grain: item i is this process's share of the i-th global batch of a course."""

    def __init__(self, reading: Reading, course: Course, part: int, parts: int):
        self.reading, self.course, self.part, self.parts = reading, course, part, parts
        self.first = course.legs[0].step
        samples = reading.samples
        end = sys.maxsize if samples is None else course.steps_within(samples * reading.length)
        self.batches = max(0, min(end - self.first, sys.maxsize))

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index) -> Batch:
        position, rows, length = self.course.rows_at(self.first + int(index))
        share = rows // self.parts
        return self.reading.cut_at(position + self.part * share * length, share, length)
