"""The delta rule over a row whose tokens are shared out over devices (k3-facts 2.7).

A shard takes the state affinely, S_end = M S_start + B, with M [K, K] and B [K, V] a head. Every device finds its own M
and B, all are gathered, and each folds those before it into the state its shard starts with. A document that begins
inside a shard makes M zero by its own decay, so borders need no other care. Gradients go the same way back:
dS_start = M^T dS_end + C, with C what the shard's own outputs say. What travels does not grow with the row.

R devices, N chunks of a shard, B rows, H heads, C tokens of a chunk, K/V key/value width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def last_ids(segment_ids: jax.Array, axis: str) -> jax.Array:
    """Document of the last valid token before this device's shard, [B] int32; 0 where there is none.

    Args:
      segment_ids: [B, T] this shard's, 0 for padding.
      axis: the mesh axis that shares out the tokens, inside ``shard_map``.
    """
    position = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    last = jnp.max(jnp.where(segment_ids > 0, position, -1), axis=1, keepdims=True)  # [B, 1]
    mine = jnp.where(last >= 0, jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1), 0)[:, 0]
    every = lax.all_gather(mine, axis)  # [R, B]
    rank = lax.axis_index(axis)
    before = jnp.zeros_like(mine)
    for i in range(every.shape[0] - 1):
        before = jnp.where((i < rank) & (every[i] > 0), every[i], before)
    return before


def transition(w: jax.Array, keys: jax.Array, whole: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """M of a shard, [B, H, K, K].

    Args:
      w: [N, B, H, C, K], what a chunk takes out of the state it starts with.
      keys: [N, B, H, C, K], by which a chunk's writes reach its end.
      whole: [N, B, H, K], decay over the chunk.
      precision: of the products.
    """

    def step(m, chunk):
        w, keys, whole = chunk
        written = -jnp.matmul(w, m, precision=precision)
        return whole[..., None] * m + jnp.einsum("...ck,...cv->...kv", keys, written, precision=precision), None

    one = jnp.broadcast_to(jnp.eye(w.shape[-1], dtype=w.dtype), (*w.shape[1:3], w.shape[-1], w.shape[-1]))
    return lax.scan(step, one, (w, keys, whole))[0]


def start_of_shard(
    state: jax.Array, m: jax.Array, own: jax.Array, axis: str, precision: lax.PrecisionLike
) -> jax.Array:
    """The state [B, H, K, V] that this device's shard starts with.

    Args:
      state: that the row starts with, the same on every device.
      m: this shard's M [B, H, K, K].
      own: this shard's B [B, H, K, V], its end from a zero state.
      axis: as in :func:`last_ids`.
      precision: of the products.
    """
    fold = partial(_fold, precision=precision)
    every = lax.all_gather((m, own), axis)
    return lax.scan(fold, state, every)[1][lax.axis_index(axis)]


def end_of_shard(m: jax.Array, own: jax.Array, axis: str, precision: lax.PrecisionLike) -> jax.Array:
    """The gradient [B, H, K, V] that reaches this device's last state from the shards after it.

    Args:
      m: this shard's M.
      own: C [B, H, K, V], the gradient of its first state without what comes from those shards.
      axis: as in :func:`last_ids`.
      precision: of the products.
    """
    fold = partial(_fold, precision=precision)
    every = lax.all_gather((jnp.swapaxes(m, -1, -2), own), axis)
    return lax.scan(fold, jnp.zeros_like(own), every, reverse=True)[1][lax.axis_index(axis)]


def _fold(state: jax.Array, shard: tuple[jax.Array, jax.Array], precision: lax.PrecisionLike):
    """(state after a shard, state before it)."""
    m, own = shard
    return jnp.matmul(m, state, precision=precision) + own, state
