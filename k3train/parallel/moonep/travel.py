"""Token rows to padded expert rows and back, over any transport, in as many phases as it needs.

With each copy of a token travel its k padded rows at the other end; so the receiver needs no list from the sender.

Letters: S tokens a rank, k assignments a token, P padded rows, T copies that arrive in a phase, D columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.numerics import wide
from k3train.parallel.moonep.layout import Layout, Sizes
from k3train.parallel.moonep.transports import Count, Wire, take


class Arrivals(NamedTuple):
    """Which padded rows the copies of one phase fill."""

    row: jax.Array
    """[T, k] int32, the padded row of each assignment of each copy; P where it is not computed here."""
    source: jax.Array
    """[P] int32, the assignment (copy * k + which) in each padded row; T k where no copy of this phase is."""


def repeat(first: Any, more: Callable[[jax.Array, Any], Any], count: Count) -> Any:
    """``first`` is what turn 0 made; adds turns 1 to ``count`` - 1 by ``more(turn, so far)``; no loop for the int 1."""
    if isinstance(count, int) and count == 1:
        return first
    start = jnp.ones((), jnp.int32), first
    return lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, more(*s)), start)[1]


def arrivals(wire: Wire, layout: Layout, sizes: Sizes, phase: Count) -> Arrivals:
    """Tells receivers where the copies of a phase belong. Integers; no two assignments share a row."""
    target = wire.out(layout.target, phase)  # [T, k]
    row = target - 1 - lax.axis_index(sizes.axis) * sizes.rows
    here = (target > 0) & (row >= 0) & (row < sizes.rows)
    number = jnp.arange(target.size, dtype=jnp.int32).reshape(target.shape)
    empty = jnp.full(sizes.rows, target.size, jnp.int32)
    # What is not computed here gets rows of its own beyond the end, so that all indices differ.
    source = empty.at[jnp.where(here, row, sizes.rows + number)].set(number, mode="drop", unique_indices=True)
    return Arrivals(jnp.where(here, row, sizes.rows), source)


def deliver(
    wire: Wire, layout: Layout, sizes: Sizes, tokens: tuple[jax.Array, ...], weights: jax.Array
) -> tuple[tuple[jax.Array, ...], jax.Array, Arrivals]:
    """Brings tokens and weights to the padded rows.

    Args:
      wire, layout, sizes: of the round.
      tokens: arrays [S, D].
      weights: [S, k].

    Returns:
      (arrays [P, D], [P] the weight of each row, the arrivals of phase 0); zeros in padding.
    """

    def phase(number: Count):
        arrived = arrivals(wire, layout, sizes, number)
        copy = arrived.source // sizes.top_k
        rows = tuple(take(wire.out(x, number), copy) for x in tokens)
        return arrived, rows, take(wire.out(weights, number).reshape(-1), arrived.source)

    def more(number, so_far):
        arrived, rows, weight = phase(number)
        new = arrived.source < arrived.row.size
        old_rows, old_weight = so_far
        rows = tuple(jnp.where(new[:, None], x, old) for x, old in zip(rows, old_rows, strict=True))
        return rows, jnp.where(new, weight, old_weight)

    first, rows, weight = phase(0)
    rows, weight = repeat((rows, weight), more, wire.phases)
    return rows, weight, first


def collect(
    wire: Wire,
    layout: Layout,
    sizes: Sizes,
    first: Arrivals,
    rows: jax.Array,
    scale: jax.Array | None = None,
    each: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Sums padded rows by token and brings the sums home.

    What a rank computed of a token is added wide, travels in the dtype of ``rows``, and is added wide at home.

    Args:
      wire, layout, sizes: of the round.
      first: the arrivals of phase 0, from :func:`deliver`.
      rows: [P, D].
      scale: [P] wide, a factor of each row; none is 1.
      each: [P] wide, a number of each row that goes back to its assignment, as it is.

    Returns:
      ([S, D] wide, [S, k] wide or None).
    """

    def phase(number: Count, arrived: Arrivals):
        total = jnp.zeros((arrived.row.shape[0], rows.shape[1]), wide(rows).dtype)
        for j in range(sizes.top_k):
            row = arrived.row[:, j]
            part = wide(take(rows, row))
            total = total + (part if scale is None else part * take(scale, row)[:, None])
        summed = wire.total(wire.back(total.astype(rows.dtype), number), number)
        if each is None:
            return summed, None
        back = wire.back(take(each, arrived.row), number)  # [H, k]
        which = jnp.arange(sizes.top_k, dtype=jnp.int32)[None]
        at = jnp.where(wire.home(number) < back.shape[0], wire.home(number) * sizes.top_k + which, back.size)
        return summed, take(back.reshape(-1), at)

    def more(number, so_far):
        return jax.tree.map(jnp.add, so_far, phase(number, arrivals(wire, layout, sizes, number)))

    return repeat(phase(0, first), more, wire.phases)
