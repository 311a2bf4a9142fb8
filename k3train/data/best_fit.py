"""Rows packed by best fit: documents stay whole where they can. Imports no JAX.

A document longer than a row gives full rows of its own, each with S targets; what is left of it, and every shorter
document, is put into the fullest row that still has room, the longest first (best-fit decreasing, Johnson 1973; for
language models Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Documents of one length are placed
together, so that the work grows with the number of lengths, not of documents.

The plan is a function of the documents' lengths and S alone. It is kept beside the store under a name that follows from
them, and made anew where it cannot be.
"""

import contextlib
import hashlib
import json
import shutil
import time
import uuid
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from k3train.config.errors import UserError
from k3train.data.pack import RowPlan
from k3train.data.store import Split

FOLDER = "plans"
_VERSION = 1
_FILES = ("stretches.bin", "rows.bin")
_ABOUT = "plan.json"
_ABANDONED = 3600
"""Seconds."""


class Table(NamedTuple):
    """Which tokens each row holds."""

    stretches: np.ndarray
    """int64 [n, 2], tokens [start, stop) of the split, in the order of rows and, within one, of the split."""
    rows: np.ndarray
    """int64 [rows + 1], first stretch of each row, then n."""


class BestFit(RowPlan):
    """Rows of whole documents, filled up with padding; built or read at the first use.

    Args:
      split, sequence_length, pad_id: see :class:`RowPlan`.
      say: told where the plan cannot be kept.
      keep: write a plan that is made; a look at a store leaves nothing behind.
    """

    def __init__(
        self,
        split: Split,
        sequence_length: int,
        pad_id: int = 0,
        say: Callable[[str], object] = lambda _: None,
        *,
        keep: bool = True,
    ):
        super().__init__(split, sequence_length, pad_id)
        self._say, self._keep = say, keep

    @cached_property
    def table(self) -> Table:
        """The plan, from the folder beside the store where it is kept.

        Raises:
          UserError: fewer tokens than a row, or no document has two.
        """
        digest = hashlib.sha256(f"{_VERSION} {self.sequence_length} ".encode())
        digest.update(np.ascontiguousarray(self.split.doc_offsets, "<i8"))
        name = digest.hexdigest()[:32]
        place = self.split.folder.parent / FOLDER / f"{self.split.folder.name}-{self.sequence_length}-{name}"
        if (kept := _read(place)) is not None:
            return kept
        self.refuse_short()
        made = plan(self.split.doc_offsets, self.sequence_length)
        if len(made.rows) < 2:
            raise UserError(
                f"{self.split.folder}: no document has two tokens, so nothing can be predicted; prepare more text"
            )
        try:
            if self._keep:
                _write(place, made)
        except OSError as error:
            self._say(f"the row plan cannot be kept in {place} ({error.strerror}); it is made anew at every start")
        return made

    @property
    def rows(self) -> int:
        """Rows, full or not."""
        return len(self.table.rows) - 1

    @property
    def padding(self) -> float:
        """Share of the rows' inputs that is padding."""
        # The last token of a full stretch is a target only.
        lengths = self.table.stretches[:, 1] - self.table.stretches[:, 0]
        filled = np.minimum(np.add.reduceat(lengths, self.table.rows[:-1]), self.sequence_length)
        return 1 - float(filled.sum()) / (self.rows * self.sequence_length)

    @property
    def summary(self) -> str:
        """Rows, and how much of them is padding."""
        alone = int((np.diff(self.split.doc_offsets) < 2).sum())
        left_out = f"; {alone:,} documents of one token are left out" if alone else ""
        rows = f"{self.rows:,} rows of {self.sequence_length:,} tokens, best fit"
        return f"{rows}; {self.padding:.2%} of them is padding{left_out}"

    def stretches(self, row: int) -> list[tuple[int, int]]:
        """Whole documents, or parts of long ones."""
        first, last = self.table.rows[row : row + 2].tolist()
        return [(start, stop) for start, stop in self.table.stretches[first:last].tolist()]

    def number(self, start: int, stop: int, before: int, to: np.ndarray) -> int:
        """A stretch is one document, or a part of one."""
        to[:] = before + 1
        return before + 1


def plan(doc_offsets: np.ndarray, sequence_length: int) -> Table:
    """Rows of up to S + 1 tokens for all documents; a last token without a target is left out.

    Args:
      doc_offsets: int64 [documents + 1].
      sequence_length: S.
    """
    starts, targets = np.asarray(doc_offsets[:-1], np.int64), np.diff(doc_offsets) - 1
    full, left = np.divmod(targets, sequence_length)
    # Full rows: stretch i of a document is its tokens [iS, iS + S + 1).
    document = np.repeat(np.arange(len(full)), full)
    which = np.arange(len(document)) - np.repeat(np.cumsum(full) - full, full)
    first = starts[document] + which * sequence_length
    rest = np.flatnonzero(left)
    begin = np.concatenate([first, starts[rest] + full[rest] * sequence_length])
    length = np.concatenate([np.full(len(first), sequence_length), left[rest]]) + 1
    bins = np.concatenate([np.arange(len(first)), len(first) + best_fit(left[rest] + 1, sequence_length + 1)])
    # Rows in the order of their first token: the store is shuffled, and so are they.
    leader = np.full(int(bins.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(leader, bins, begin)
    order = np.lexsort((begin, leader[bins]))
    counts = np.bincount(bins, minlength=len(leader))[np.argsort(leader, kind="stable")]
    stretches = np.stack([begin, begin + length], axis=1)[order]
    return Table(stretches, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, int64 [n], numbered from 0 as they are opened: best-fit decreasing.

    Args:
      sizes: int64 [n], each from 1 to ``capacity``.
      capacity: of a bin.
    """
    order = np.argsort(-sizes, kind="stable")
    lengths, counts = np.unique(sizes, return_counts=True)
    bins = np.empty(len(sizes), np.int64)
    open_bins: dict[int, list[np.ndarray]] = {}  # by room left
    rooms: list[int] = []  # rising
    opened = done = 0

    def put(room: int, numbers: np.ndarray) -> None:
        if room and len(numbers):
            if room not in open_bins:
                insort(rooms, room)
            open_bins.setdefault(room, []).append(numbers)

    for size, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                numbers = open_bins[room].pop()
                if not open_bins[room]:
                    del open_bins[room], rooms[at]
            else:
                room = capacity
                numbers = np.arange(opened, opened - (-count // (capacity // size)))
                opened += len(numbers)
            # The fullest row with room is the one that just got an item, until it has no more.
            each = room // size
            taken = min(count, each * len(numbers))
            used, more = divmod(taken, each)
            bins[order[done : done + taken]] = np.repeat(numbers[: used + (more > 0)], min(each, taken))[:taken]
            put(room - each * size, numbers[:used])
            put(room - more * size, numbers[used : used + (more > 0)])
            put(room, numbers[used + (more > 0) :])
            done, count = done + taken, count - taken
    return bins


def _read(place: Path) -> Table | None:
    """What was kept, if it is what was written."""
    try:
        sums = json.loads((place / _ABOUT).read_text(encoding="utf-8"))["sha256"]
        content = [np.fromfile(place / name, "<i8") for name in _FILES]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if [hashlib.sha256(array).hexdigest() for array in content] != sums:
        return None
    return Table(content[0].reshape(-1, 2), content[1])


def _write(place: Path, table: Table) -> None:
    """Whole or not at all; several processes may do it at once."""
    place.parent.mkdir(exist_ok=True)
    for left in place.parent.glob(".*-*"):  # of a process that was killed while it wrote; nobody writes for so long
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left)
    made = place.parent / f".{place.name}-{uuid.uuid4().hex}"  # unlike mkdtemp's, open to those who may read the store
    try:
        made.mkdir()
        sums = []
        for name, array in zip(_FILES, table, strict=True):
            content = np.ascontiguousarray(array, "<i8")
            content.tofile(made / name)
            sums.append(hashlib.sha256(content).hexdigest())
        (made / _ABOUT).write_text(json.dumps({"version": _VERSION, "sha256": sums}) + "\n", encoding="utf-8")
        if place.exists():  # it did not read well
            shutil.rmtree(place, ignore_errors=True)
        made.replace(place)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not place.exists():  # else another process was faster
            raise
