"""Embedding lookup whose gradient does not fight over rows.

The plain gradient scatters N token gradients into V rows. With a byte vocabulary tens of thousands of tokens meet in
a few rows, and a GPU then adds one after the other (88 of 935 ms of a step on an H200, docs/log.md). For small
vocabularies the same sum is a matrix product with the one-hot tokens: fast, and in a fixed order.

Shapes: B rows, T tokens, V vocabulary, D hidden.
"""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide_dtype

ONE_HOT_VOCABULARY = 1024
"""Up to this many rows the gradient is a product; beyond, rows are met seldom and scattering is cheaper."""


@jax.custom_vjp
def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of ``table`` [V, D] for token ids [B, T] int32 in [0, V): [B, T, D] in the table's dtype."""
    return table[tokens]


def _forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return table[tokens], (tokens, table)


def _backward(saved: tuple[jax.Array, jax.Array], d_rows: jax.Array) -> tuple[jax.Array, None]:
    """Gradient [V, D] in the table's dtype, summed wide."""
    tokens, table = saved
    wide = wide_dtype(table.dtype)
    if table.shape[0] <= ONE_HOT_VOCABULARY:
        one_hot = jax.nn.one_hot(tokens, table.shape[0], dtype=d_rows.dtype)  # [B, T, V]
        total = jnp.einsum("btv,btd->vd", one_hot, d_rows, preferred_element_type=wide)
    else:
        total = jnp.zeros(table.shape, wide).at[tokens].add(d_rows.astype(wide))
    return total.astype(table.dtype), None


lookup.defvjp(_forward, _backward)
