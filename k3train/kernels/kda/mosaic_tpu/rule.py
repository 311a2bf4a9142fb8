"""The delta rule by our Pallas TPU kernels, with its gradient (k3-facts 2.3, 2.4), for heads of width 128.

Forward, one kernel goes through the chunks with the state in VMEM. For a gradient it also writes the states that
chunks start with, and a second kernel goes back through the chunks, forming the rest of each anew from the inputs.
A row shared out over devices goes the way of ``context.py``: kernels of the same steps find how a shard takes the
state, and what its own outputs say of the gradient of its first state.

B rows, T tokens, H heads, N chunks, C tokens of a chunk, K/V key/value width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.kda import context
from k3train.kernels.kda.mosaic_tpu import calls
from k3train.kernels.kda.mosaic_tpu.pairs import CHUNK


class Saved(NamedTuple):
    """What the backward pass takes from the forward one."""

    arrays: calls.Arrays
    starts: jax.Array
    """[B, H, N, V, K]."""
    transition: jax.Array | None
    """M of a shard, [B, H, K, K]; None where a device has whole rows."""


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def mosaic_tpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    flags: jax.Array,
    scale: float,
    precision: lax.PrecisionLike,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """What :func:`k3train.kernels.kda.api.kda` returns, on a TPU or in Pallas' TPU interpret mode.

    Args:
      q: [B, T, H, 128].
      k: [B, T, H, 128].
      v: [B, T, H, 128]; all three of any float dtype up to float32.
      g: [B, T, H, 128] log-decay, float32.
      beta: [B, T, H] float32, 0 at padding.
      state: [B, H, 128, 128] float32 before the first token (with ``axis``, of the row).
      flags: [B, T] float32, 0 for padding, 2 for a token at which the state restarts, 1 for any other.
      scale: of q.
      precision: of products of float32.
      axis: mesh axis over which a row's tokens are shared out, or None.
    """
    return _forward(q, k, v, g, beta, state, flags, scale, precision, axis, save=False)[0]


def _forward(q, k, v, g, beta, state, flags, scale, precision, axis, save=True):
    tokens = q.shape[1]
    q, k, v, g = (_at_least_a_chunk(x) for x in (q, k, v, g))
    arrays = calls.Arrays(jnp.full((1, 1), scale, jnp.float32), _cut(flags), _by_head(beta), q, k, v, g)
    moves = None
    if axis is not None:
        moves, own = calls.forward_summary(arrays, precision)
        state = context.start_of_shard(state, moves, own, axis, precision)
    o, last, *starts = calls.forward(arrays, _turned(state), precision, save=save)
    return (o[:, :tokens], _turned(last)), Saved(arrays, starts[0], moves) if save else None


def _backward(scale, precision, axis, saved: Saved, cotangents):
    arrays, starts, moves = saved
    tokens = cotangents[0].shape[1]
    d_o, d_last = _at_least_a_chunk(cotangents[0]), cotangents[1]
    if moves is not None:
        own = _turned(calls.backward_summary(arrays, d_o, _turned(d_last), precision))
        d_last = d_last + context.end_of_shard(moves, own, axis, precision)
    *grads, d_beta, d_first = calls.backward(arrays, d_o, starts, _turned(d_last), precision)
    d_first = _turned(d_first)
    if moves is not None:  # the row's state enters the first shard only
        d_first = jnp.where(lax.axis_index(axis) == 0, d_first, 0)
    d_beta = d_beta.reshape(*d_beta.shape[:2], -1)[..., :tokens]
    flags = jnp.zeros((d_o.shape[0], tokens), jnp.float32)
    return *(x[:, :tokens] for x in grads), jnp.moveaxis(d_beta, 1, 2), d_first, flags


mosaic_tpu.defvjp(_forward, _backward)


def _turned(state: jax.Array) -> jax.Array:
    """[.., K, V] to [.., V, K] and back."""
    return jnp.swapaxes(state, -1, -2)


def _at_least_a_chunk(x: jax.Array) -> jax.Array:
    """x [B, T, H, D] with T up to C; a longer row's last tile may hang over its end."""
    return jnp.pad(x, ((0, 0), (0, max(0, CHUNK - x.shape[1])), (0, 0), (0, 0)))


def _cut(x: jax.Array) -> jax.Array:
    """[.., T] to [.., N, 1, C], 0 past the end."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % CHUNK)])
    return x.reshape(*x.shape[:-1], -1, 1, CHUNK)


def _by_head(beta: jax.Array) -> jax.Array:
    """[B, T, H] to [B, H, N, 1, C]."""
    return _cut(jnp.moveaxis(beta, 2, 1))
