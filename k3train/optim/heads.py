"""Blocks of Per-Head Muon: an array's last axis, head by head."""

import jax
import jax.numpy as jnp


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., n, H*d] -> [..., H, n, d]; one head leaves the array alone."""
    if heads == 1:
        return x
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), -3, -2)


def join_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., H, n, d] -> [..., n, H*d]; the inverse of :func:`split_heads`."""
    if heads == 1:
        return x
    x = jnp.swapaxes(x, -3, -2)  # [..., n, H, d]
    return x.reshape(*x.shape[:-2], -1)
