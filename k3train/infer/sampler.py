"""Next-token choice: greedy, temperature, nucleus."""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide

COLDEST = 1e-30


def sample(logits: jax.Array, key: jax.Array, temperature: float, top_p: float, limit: int) -> jax.Array:
    """Draws one token id a row.

    Args:
      logits: [B, V] any float dtype.
      temperature: divisor of the logits; 0 takes the likeliest.
      top_p: probability mass of the nucleus; tokens outside the smallest set that reaches it are never drawn.
      limit: ids from here on are never drawn (vocabulary entries beyond the tokenizer's).

    Returns:
      [B] int32.
    """
    logits = wide(logits)
    allowed = jnp.arange(logits.shape[-1])[None, :] < limit
    logits = jnp.where(allowed, logits, -jnp.inf)
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the largest down, so that a temperature near 0 does not overflow; below COLDEST it would be 0 in float32.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / max(temperature, COLDEST)
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    mass = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
    # The likeliest token is always in; a token is in while the mass before it is below top_p.
    last = jnp.sum(mass < top_p, axis=-1, keepdims=True)
    floor = jnp.take_along_axis(ordered, jnp.minimum(last, logits.shape[-1] - 1), axis=-1)
    return jax.random.categorical(key, jnp.where(logits < floor, -jnp.inf, logits), axis=-1).astype(jnp.int32)
