"""What devices along the ``context`` axis hand to each other, inside ``shard_map``.

Shapes: B rows, T tokens of a device.
"""

import jax
import jax.numpy as jnp
from jax import lax


def from_left(x: jax.Array, axis: str) -> jax.Array:
    """``x`` of the device before this one along ``axis``; zeros on the first."""
    return lax.ppermute(x, axis, [(i, i + 1) for i in range(lax.axis_size(axis) - 1)])


def swap_halves(x: jax.Array, axis: str) -> jax.Array:
    """[B, T, ...] with the second half of the tokens exchanged with the device opposite (r and R - 1 - r).

    Causal work grows with a token's place: after the exchange every device has as much of it. It undoes itself.
    """
    size = lax.axis_size(axis)
    kept, sent = jnp.split(x, 2, axis=1)
    return jnp.concatenate([kept, lax.ppermute(sent, axis, [(i, size - 1 - i) for i in range(size)])], axis=1)


def stretches(tokens: int, axis: str) -> jax.Array:
    """Places [2] int32 in the row at which a device's two halves begin after :func:`swap_halves`."""
    rank, size = lax.axis_index(axis), lax.axis_size(axis)
    return jnp.stack([rank * tokens, (size - 1 - rank) * tokens + tokens // 2]).astype(jnp.int32)


def gather_tokens(x: jax.Array, axis: str) -> jax.Array:
    """All tokens [B, R T, ...] of the row, in their order, of shards whose halves are swapped."""
    size = lax.axis_size(axis)
    every = lax.all_gather(x, axis, axis=1)  # [B, R, T, ...]
    first, second = jnp.split(every, 2, axis=2)
    ordered = jnp.concatenate([first, second[:, ::-1]], axis=2)  # device r's second half came from R - 1 - r
    return ordered.reshape(x.shape[0], size * x.shape[1], *x.shape[2:])
