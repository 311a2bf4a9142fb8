"""The delta rule token by token: slow, obvious, the yardstick of the others (k3-facts 2.1)."""

import jax
import jax.numpy as jnp
from jax import lax


def recurrent(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    precision: lax.PrecisionLike,
) -> tuple[jax.Array, jax.Array]:
    """Decay the state, write the residual at the key, read with the query; a scan over tokens.

    Args:
      q: [B, T, H, K], scaled.
      k: [B, T, H, K].
      v: [B, T, H, V].
      g: [B, T, H, K] logarithms of the decay; -inf forgets what came before (a new document).
      beta: [B, T, H].
      state: [B, H, K, V] before the first token.
      precision: of the matrix products.
      All of one wide dtype.

    Returns:
      o [B, T, H, V] and the state after the last token.
    """

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = token
        state = decay[..., None] * state
        residual = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", state, k, precision=precision))
        state = state + k[..., None] * residual[..., None, :]
        return state, jnp.einsum("bhkv,bhk->bhv", state, q, precision=precision)

    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay_factors(g), beta))
    state, o = lax.scan(step, state, tokens)
    return jnp.moveaxis(o, 0, 1), state


def decay_factors(g: jax.Array) -> jax.Array:
    """exp(g), exactly 0 for -inf on every backend."""
    return jnp.where(g == -jnp.inf, 0, jnp.exp(g))
