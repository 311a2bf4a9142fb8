"""A row cut into segments that run side by side, where heads and rows alone leave most of the card idle.

The way a state takes through a segment is affine (``context.py``): S_end = M S_start + B. One pass over all segments at
once finds every M and B, a short fold gives each segment's first state, and the real pass starts from those; gradients
of states go the same way back. That is up to three short passes instead of a long one.

S segments of a row; states are transposed, [.., V, K], as the kernels hold them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.kda.mosaic_gpu import recurrence
from k3train.kernels.kda.mosaic_gpu.intra import Factors

LEAST = 4
"""Fewer segments do not pay for the passes they cost."""
LEAST_CHUNKS = 8
"""Of a segment."""


def count(batch: int, heads: int, chunks: int) -> int:
    """Segments of a row: as many as fill the card with half heads, a divisor of ``chunks``; 1 where it fills anyway."""
    most = min(recurrence.MULTIPROCESSORS // (2 * batch * heads), chunks // LEAST_CHUNKS)
    divisors = [n for n in range(LEAST, most + 1) if chunks % n == 0]
    return divisors[-1] if divisors else 1


def cut[Tree](tree: Tree, segments: int) -> Tree:
    """[B, T, ..] to [B*S, T/S, ..], for every array; chunks come second too."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * segments, x.shape[1] // segments, *x.shape[2:]), tree)


def joined(x: jax.Array, segments: int) -> jax.Array:
    """The reverse of :func:`cut`."""
    return x.reshape(x.shape[0] // segments, x.shape[1] * segments, *x.shape[2:])


def starts(factors: Factors, moves: jax.Array, state: jax.Array, segments: int) -> jax.Array:
    """The state before every segment, [B*S, H, V, K].

    Args:
      factors: of all segments, cut.
      moves: M^T of every segment, [B*S, H, K, K].
      state: before the row, [B, H, V, K].
      segments: S.
    """
    own = recurrence.end(factors, jnp.zeros(moves.shape, jnp.float32))
    return _fold(moves, own, state, segments, backward=False)


def ends(factors: Factors, moves: jax.Array, d_o: jax.Array, d_state: jax.Array, segments: int) -> jax.Array:
    """The gradient of the state after every segment, [B*S, H, V, K].

    Args:
      factors, moves, segments: as in :func:`starts`.
      d_o: cut as ``factors`` are.
      d_state: gradient of the row's last state, [B, H, V, K].
    """
    own = recurrence.reverse_end(factors, d_o, jnp.zeros(moves.shape, jnp.float32))
    return _fold(jnp.swapaxes(moves, -1, -2), own, d_state, segments, backward=True)


def _fold(moves: jax.Array, own: jax.Array, state: jax.Array, segments: int, *, backward: bool) -> jax.Array:
    """What ``state`` has become before each segment."""

    def step(state: jax.Array, segment: tuple[jax.Array, jax.Array]):
        move, own = segment
        return jnp.matmul(state, move, precision=lax.Precision.HIGHEST) + own, state

    by_segment = lambda x: jnp.moveaxis(x.reshape(-1, segments, *x.shape[1:]), 1, 0)  # noqa: E731
    before = lax.scan(step, state, (by_segment(moves), by_segment(own)), reverse=backward)[1]
    return jnp.moveaxis(before, 0, 1).reshape(own.shape)
