"""Grouped matmul by brute force: every expert multiplies all rows, a mask keeps its own. For tests."""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


def grouped_matmul(rows: jax.Array, weights: jax.Array, block_expert: jax.Array) -> jax.Array:
    """See :func:`k3train.kernels.grouped_matmul.api.grouped_matmul`."""
    expert = jnp.repeat(block_expert, rows.shape[0] // block_expert.shape[0])  # [P]
    out = jnp.zeros((rows.shape[0], weights.shape[2]), wide(rows).dtype)
    for e in range(weights.shape[0]):
        out = jnp.where((expert == e)[:, None], wide(rows) @ wide(weights[e]), out)
    return out.astype(rows.dtype)
