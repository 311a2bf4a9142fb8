"""Rows of each source in the blocks of a mixture, from its weights. Imports neither JAX nor NumPy."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

STAIRS = 256
"""Most steps of a blend, so that the table of a mixture stays small however long the blend is."""


class Blocks(NamedTuple):
    """What the blocks of each stretch of a mixture hold: a phase, a step of a blend, or what is left of one of them
    when a source is used up."""

    names: tuple[str, ...]
    """The sources, sorted."""
    firsts: tuple[int, ...]
    """First block of each stretch; the first is 0, and they increase."""
    counts: tuple[tuple[int, ...], ...]
    """For each stretch the rows of each source in a block."""


class Phase(NamedTuple):
    """Weights from some point of a run on."""

    tokens: int
    """Nominal tokens at which it begins."""
    weights: Mapping[str, float]
    blend: bool = False
    """Whether its weights move in a straight line to the next phase's."""


def blocks(
    names: Iterable[str],
    block: int,
    phases: Sequence[Phase],
    row_tokens: int,
    most: Mapping[str, int | None] | None = None,
) -> Blocks:
    """The blocks of phases. A phase begins at the first border of a block at or after its tokens.

    Args:
      names: the sources; their order does not matter.
      block: rows of a block.
      row_tokens: nominal tokens of a row.
      most: rows that may be read of each source, None for any number; after them the others share its weight.

    Raises:
      ValueError: the phases do not begin at 0 or one after the other, a source is unknown or never read, or a weight
        gets no row in a block; says what would do.
    """
    names = tuple(sorted(names))
    if not phases or phases[0].tokens != 0:
        raise ValueError("mixture.phases: the first phase begins at tokens: 0")
    if phases[-1].blend:
        raise ValueError("mixture.phases: the last one has no phase after it to blend to; set blend: none")
    firsts: list[int] = []
    for index, phase in enumerate(phases):
        first = -(-phase.tokens // (row_tokens * block))
        if firsts and first <= firsts[-1]:
            raise ValueError(
                f"mixture.phases: phase {index} (tokens: {phase.tokens}) does not begin at least one block of {block} "
                f"rows = {block * row_tokens} tokens after the phase before; set them further apart or mixture.block "
                "smaller"
            )
        firsts.append(first)
    exact = [_exact(names, block, phase.weights, index) for index, phase in enumerate(phases)]
    unread = [name for column, name in enumerate(names) if not any(weights[column] for weights in exact)]
    if unread:
        raise ValueError(f"sources {', '.join(unread)}: no phase of the mixture gives a weight; give one or leave out")
    stretches: list[_Stretch] = []
    for index, phase in enumerate(phases):
        if phase.blend:
            stretches += _stairs(firsts[index], firsts[index + 1], exact[index], exact[index + 1])
        else:
            stretches.append(_Stretch(firsts[index], exact[index]))
    rows = _rows(stretches, block, [most.get(name) if most else None for name in names])
    merged = [row for n, row in enumerate(rows) if n == 0 or row[1] != rows[n - 1][1]]
    return Blocks(names, *map(tuple, zip(*merged, strict=True)))


class _Stretch(NamedTuple):
    """Blocks with the same weights."""

    first: int
    weights: list[Fraction]


def _stairs(first: int, end: int, start: list[Fraction], target: list[Fraction]) -> list[_Stretch]:
    """Blocks [first, end) with weights on the straight line between two mixtures, taken where each stair begins."""
    count = min(STAIRS, end - first)
    borders = [first + (end - first) * n // count for n in range(count)]
    shares = [[weight / sum(side) for weight in side] for side in (start, target)]
    found = []
    for border in borders:
        way = Fraction(border - first, end - first)
        found.append(_Stretch(border, [a + (b - a) * way for a, b in zip(*shares, strict=True)]))
    return found


def _rows(stretches: list[_Stretch], block: int, most: list[int | None]) -> list[tuple[int, tuple[int, ...]]]:
    """(first block, rows of each source in a block), with what used up sources leave shared among the others.

    Where nobody is left, the weights stay, and the reader says which source is used up (``data/reading.py``).
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    used = [0] * len(most)
    ends = [after.first for _, after in pairwise(stretches)] + [None]
    for stretch, end in zip(stretches, ends, strict=True):
        at = stretch.first
        while end is None or at < end:
            left = [None if limit is None else limit - done for limit, done in zip(most, used, strict=True)]
            row = _block(stretch.weights, block, left)
            if row is None:
                found.append((at, tuple(largest_remainder(stretch.weights, block))))
                break
            whole = [room // count for room, count in zip(left, row, strict=True) if room is not None and count]
            spans = whole if end is None else [*whole, end - at]
            found.append((at, tuple(row)))
            if not spans:
                break  # for ever
            at += min(spans)
            used = [done + min(spans) * count for done, count in zip(used, row, strict=True)]
    return found


def _block(weights: list[Fraction], block: int, left: list[int | None]) -> list[int] | None:
    """Rows of each source in a block, no more than are left of it; None where all together are too few."""
    row = [0] * len(weights)
    open_, room = [i for i, weight in enumerate(weights) if weight and left[i] != 0], block
    while open_:
        shares = dict(zip(open_, largest_remainder([weights[i] for i in open_], room), strict=True))
        short = {i: limit for i in open_ if (limit := left[i]) is not None and limit < shares[i]}
        for i, count in (short or shares).items():
            row[i] = count
        if not short:
            return row
        room -= sum(short.values())
        open_ = [i for i in open_ if i not in short]
    return None


def largest_remainder(weights: Sequence[Fraction], block: int) -> list[int]:
    """Whole numbers in proportion to ``weights`` that sum to ``block``; the largest remainders are rounded up.

    Of equal remainders the earlier one goes first (Hamilton's method).
    """
    total = sum(weights)
    quotas = [block * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: block - sum(counts)]:
        counts[i] += 1
    return counts


def _exact(names: tuple[str, ...], block: int, weights: Mapping[str, float], index: int) -> list[Fraction]:
    """The weights of phase ``index``, each of which gets a row in a block."""
    key = f"mixture.phases[{index}].weights"
    if unknown := [name for name in weights if name not in names]:
        raise ValueError(f"{key}: no source {', '.join(unknown)}; data.sources has {', '.join(names)}")
    # As decimals: 0.8 is four fifths, as the person who wrote it means.
    exact = [Fraction(repr(float(weights.get(name, 0.0)))) for name in names]
    if not any(exact):
        raise ValueError(f"{key}: no source has a weight above 0")
    for name, weight, count in zip(names, exact, largest_remainder(exact, block), strict=True):
        if weight and not count:
            enough = -(-sum(exact) // min(filter(None, exact)))
            raise ValueError(
                f"{key}.{name}: {weights[name]:g} gets no row in a block of {block}; "
                f"set mixture.block to {enough} or more, or the weight to 0"
            )
    return exact
