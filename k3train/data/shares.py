"""Rows of each source in the blocks of a mixture, from its weights. Imports neither JAX nor NumPy."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple


class Blocks(NamedTuple):
    """What the blocks of each phase hold."""

    names: tuple[str, ...]
    """The sources, sorted."""
    firsts: tuple[int, ...]
    """First block of each phase; the first is 0, and they increase."""
    counts: tuple[tuple[int, ...], ...]
    """For each phase the rows of each source in a block."""


def blocks(
    names: Iterable[str], block: int, phases: Sequence[tuple[int, Mapping[str, float]]], row_tokens: int
) -> Blocks:
    """The blocks of phases (nominal tokens at which each begins, weights by source).

    A phase begins at the first border of a block at or after its tokens.

    Args:
      names: the sources; their order does not matter.
      block: rows of a block.
      row_tokens: nominal tokens of a row.

    Raises:
      ValueError: the phases do not begin at 0 or one after the other, a source is unknown or never read, or a weight
        gets no row in a block; says what would do.
    """
    names = tuple(sorted(names))
    if not phases or phases[0][0] != 0:
        raise ValueError("mixture.phases: the first phase begins at tokens: 0")
    firsts: list[int] = []
    for index, (tokens, _) in enumerate(phases):
        first = -(-tokens // (row_tokens * block))
        if firsts and first <= firsts[-1]:
            raise ValueError(
                f"mixture.phases: phase {index} (tokens: {tokens}) does not begin at least one block of {block} rows "
                f"= {block * row_tokens} tokens after the phase before; set them further apart or mixture.block smaller"
            )
        firsts.append(first)
    counts = tuple(_counts(names, block, weights, index) for index, (_, weights) in enumerate(phases))
    unread = [name for column, name in enumerate(names) if not any(row[column] for row in counts)]
    if unread:
        raise ValueError(f"sources {', '.join(unread)}: no phase of the mixture gives a weight; give one or leave out")
    return Blocks(names, tuple(firsts), counts)


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


def _counts(names: tuple[str, ...], block: int, weights: Mapping[str, float], index: int) -> tuple[int, ...]:
    """Rows of each source in a block of phase ``index``."""
    key = f"mixture.phases[{index}].weights"
    if unknown := [name for name in weights if name not in names]:
        raise ValueError(f"{key}: no source {', '.join(unknown)}; data.sources has {', '.join(names)}")
    # As decimals: 0.8 is four fifths, as the person who wrote it means.
    exact = [Fraction(repr(float(weights.get(name, 0.0)))) for name in names]
    if not any(exact):
        raise ValueError(f"{key}: no source has a weight above 0")
    counts = largest_remainder(exact, block)
    for name, weight, count in zip(names, exact, counts, strict=True):
        if weight and not count:
            enough = -(-sum(exact) // min(filter(None, exact)))
            raise ValueError(
                f"{key}.{name}: {weights[name]:g} gets no row in a block of {block}; "
                f"set mixture.block to {enough} or more, or the weight to 0"
            )
    return tuple(counts)
