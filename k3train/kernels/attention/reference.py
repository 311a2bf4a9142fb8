"""Causal attention written out: all scores at once, everything wide. For tests."""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scale: float,
    place: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See :func:`k3train.kernels.attention.api.attention`; ``place`` [T] int32 is where queries stand in the row."""
    q, k, v = wide(q), wide(k), wide(v)
    tokens = jnp.arange(k.shape[1])
    place = tokens if place is None else place
    causal = place[:, None] >= tokens[None, :]  # [T, S]
    mine = segment_ids[:, place]
    same = (mine[:, :, None] == segment_ids[:, None, :]) & (mine != 0)[:, :, None]  # [B, T, S]
    valid = (same & causal[None])[:, None]  # [B, 1, T, S]
    scores = scale * jnp.einsum("bthd,bshd->bhts", q, k)
    scores = jnp.where(valid, scores, -jnp.inf)
    max_logit = jax.lax.stop_gradient(jnp.max(scores, axis=(0, 2, 3)))  # [H]
    # A row without a key would be 0/0: give it equal scores first, zeros after.
    some = jnp.any(valid, axis=-1, keepdims=True)  # [B, 1, T, 1]
    p = jnp.where(some, jax.nn.softmax(jnp.where(some, scores, 0.0), axis=-1), 0.0)
    return jnp.einsum("bhts,bshd->bthd", p, v), jnp.where(jnp.isneginf(max_logit), 0.0, max_logit)
