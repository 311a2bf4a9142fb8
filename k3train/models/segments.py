"""How a list of layer kinds becomes a prefix, a scanned period and a tail. Imports no JAX."""

from collections.abc import Sequence
from typing import NamedTuple

from k3train.models.config import LayerKind


class Segment(NamedTuple):
    """``repeats`` copies of the same few layers, one after the other.

    Attributes:
      name: ``prefix``, ``period`` or ``tail``; the key of its parameters.
      first: number of its first layer, from 0.
      kinds: the layers of one copy.
      repeats: copies; their parameters are stacked on a leading axis, also where it is 1.
    """

    name: str
    first: int
    kinds: tuple[LayerKind, ...]
    repeats: int

    def layer(self, repeat: int, position: int) -> int:
        """Number of the layer at ``position`` of copy ``repeat``, from 0."""
        return self.first + repeat * len(self.kinds) + position


def segments(kinds: Sequence[LayerKind]) -> tuple[Segment, ...]:
    """Splits ``kinds`` so that the fewest distinct layers are compiled; ties go to the shorter period."""
    kinds, count = tuple(kinds), len(kinds)
    best = (count, 0, count, 0)  # layers compiled, period, prefix, repeats
    for period in range(1, count // 2 + 1):
        for start in range(count - 2 * period + 1):
            copy, repeats = kinds[start : start + period], 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == copy:
                repeats += 1
            if repeats > 1:
                compiled = count - (repeats - 1) * period
                best = min(best, (compiled, period, start, repeats))
    _, period, start, repeats = best
    tail = start + period * repeats
    parts = (
        Segment("prefix", 0, kinds[:start], 1),
        Segment("period", start, kinds[start : start + period], repeats),
        Segment("tail", tail, kinds[tail:], 1),
    )
    return tuple(part for part in parts if part.kinds and part.repeats)
