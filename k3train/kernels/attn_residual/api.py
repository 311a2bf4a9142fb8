"""Attention over depth: each token mixes the rows that earlier sub-layers left behind.

Shapes: N rows of the bank, B batch, T tokens, D hidden.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


class Row(NamedTuple):
    """A row beside the bank, and whether it takes part (a traced or plain bool)."""

    value: jax.Array  # [B, T, D]
    valid: jax.Array | bool


def _scores(rows: jax.Array, query: jax.Array, eps: float) -> jax.Array:
    """Scores [...] of rows [..., D]: the query's product with the row after RMS normalisation."""
    rows = wide(rows)
    inverse_rms = jax.lax.rsqrt(jnp.mean(rows * rows, axis=-1) + eps)
    return inverse_rms * jnp.einsum("...d,d->...", rows, query)


@functools.partial(jax.checkpoint, static_argnums=(4,))
def mix(
    bank: jax.Array, filled: jax.Array, rows: Sequence[Row], query: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Softmax-weighted sum of the bank's filled rows and of ``rows`` (k3-facts 4.3; arXiv 2603.15031 eq. 5).

    score_r = sum_d (r / sqrt(mean r^2 + eps))_d * query_d; weights are its softmax over all rows; values are the
    raw rows. The bank is read in place: nothing is concatenated but the scores. The backward pass recomputes
    everything from the rows, so none of their wide copies is kept.

    Args:
      bank: [N, B, T, D], any float dtype; rows from ``filled`` on are ignored whatever finite values they hold.
      filled: int32 scalar, how many rows of the bank count.
      rows: more rows, in order; the last one is the running sum.
      query: [D] wide, norm weight times pseudo-query.
      eps: of the RMS normalisation.

    Returns:
      The mixed rows [B, T, D] in the dtype of the last row, and the weights [N + len(rows), B, T] wide.
    """
    out_dtype = rows[-1].value.dtype
    query = wide(query)
    count = bank.shape[0]
    valid = jnp.concatenate(
        [jnp.arange(count, dtype=jnp.int32) < filled, jnp.stack([jnp.asarray(row.valid) for row in rows])]
    )
    scores = jnp.concatenate([_scores(bank, query, eps), jnp.stack([_scores(row.value, query, eps) for row in rows])])
    scores = jnp.where(valid[:, None, None], scores, -jnp.inf)  # [N + rows, B, T]
    weights = jax.nn.softmax(scores, axis=0)
    mixed = jnp.einsum("nbt,nbtd->btd", weights[:count], wide(bank))
    for weight, row in zip(weights[count:], rows, strict=True):
        mixed = mixed + weight[..., None] * wide(row.value)
    return mixed.astype(out_dtype), weights
