"""``ragged_all_to_all`` in many pieces, and what stands in for it on CPU.

XLA's GPU kernel moves pieces side by side but each with few threads, so what goes to a rank is cut into
``SUB_SLICES`` pieces. XLA:CPU HAS NO SUCH OP: there an emulation of the same contract runs (all-gather, then each
output row looks for the piece that holds it). It is for tests and says so in the log; its speed means nothing.
"""

import functools
import logging

import jax
import jax.numpy as jnp
from jax import lax

from k3train.parallel.moonep.config import SUB_SLICES

log = logging.getLogger(__name__)


def pieces(rows: int, parts: int = 1) -> int:
    """Pieces for each of ``parts`` stretches of at most ``rows`` rows that go to one rank: SUB_SLICES in all."""
    return max(1, min(rows, -(-SUB_SLICES // parts)))


def cut(start: jax.Array, size: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Cuts stretches into ``count`` nearly equal pieces.

    Args:
      start, size: [n] int32, of each stretch; a size times ``count`` stays below 2**31.
      count: pieces of each.

    Returns:
      (starts, sizes), each [n * count] int32.
    """
    edges = size[:, None] * jnp.arange(count + 1, dtype=jnp.int32)[None] // count
    return (start[:, None] + edges[:, :-1]).reshape(-1), jnp.diff(edges, axis=1).reshape(-1)


def exchange(
    x: jax.Array,
    rows: int,
    *,
    starts: jax.Array,
    sizes: jax.Array,
    at: jax.Array,
    received: jax.Array,
    count: int,
    axis: str,
) -> jax.Array:
    """Sends stretches of rows to other ranks.

    Args:
      x: [N, D].
      rows: of the result.
      starts, sizes: [R, n] int32, the n stretches of ``x`` that go to each rank.
      at: [R, n] int32, the row of the receiver's result at which each stretch begins.
      received: [R, n] int32, sizes of the stretches that each rank sends here.
      count: pieces a stretch is cut into.
      axis: mesh axis.

    Returns:
      [rows, D], zeros where nothing arrived.
    """
    starts, cuts = cut(starts.reshape(-1), sizes.reshape(-1), count)
    at, _ = cut(at.reshape(-1), sizes.reshape(-1), count)
    _, received = cut(received.reshape(-1), received.reshape(-1), count)
    out = jnp.zeros((rows, x.shape[1]), x.dtype)
    send = functools.partial(lax.ragged_all_to_all, axis_name=axis)
    stand_in = functools.partial(_emulated, axis=axis)
    return lax.platform_dependent(x, out, starts, cuts, at, received, cpu=stand_in, default=send)


@functools.cache
def _say() -> None:
    log.warning("XLA:CPU has no ragged_all_to_all: transport 'ragged' runs an emulation there, for tests only")


def _emulated(x, out, starts, sizes, at, received, *, axis):
    del received  # the contract of ragged_all_to_all has it; here the senders' sizes say the same
    me, ranks = lax.axis_index(axis), lax.axis_size(axis)
    everyone = lax.all_gather(x, axis)  # [R, N, D]
    # What each rank sends to this one: [R * pieces].
    starts, sizes, at = (lax.all_gather(a.reshape(ranks, -1), axis)[:, me].reshape(-1) for a in (starts, sizes, at))
    row = jnp.arange(out.shape[0], dtype=jnp.int32)[:, None]
    holds = (row >= at[None]) & (row < (at + sizes)[None])  # [rows, R * pieces]
    piece = lax.argmax(holds, 1, jnp.int32)
    source = jnp.minimum(starts[piece] + row[:, 0] - at[piece], x.shape[0] - 1)
    value = everyone[piece // (len(at) // ranks), source]
    return jnp.where(jnp.any(holds, axis=1)[:, None], value, out)


def note_platform() -> None:
    """Says in the log, once, that the emulation runs, where the default backend is CPU."""
    if jax.default_backend() == "cpu":
        _say()
