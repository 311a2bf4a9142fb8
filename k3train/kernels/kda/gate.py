"""From raw projections to what the delta rule takes: log-decay and unit keys (k3-facts 2.1).

H heads, K key width. All arithmetic is wide (float32, or float64 where the input is).
"""

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.numerics import wide


def kda_gate(raw: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """Log-decay g per head and key channel, from z = raw + dt_bias.

    ``-exp(a_log) softplus(z)`` where there is no bound (Kimi-Linear), else
    ``lower_bound sigmoid(exp(a_log) z)`` (K3); k3-facts 2.1.

    Args:
      raw: [..., H, K].
      a_log: [H].
      dt_bias: [H*K], head major.
      lower_bound: least log-decay a token (negative), or None for the softplus form.

    Returns:
      g [..., H, K] wide, nowhere above 0.
    """
    lead = (1,) * (raw.ndim - 2)
    heads, width = raw.shape[-2:]
    z = wide(raw) + wide(dt_bias).reshape(*lead, heads, width)
    rate = jnp.exp(wide(a_log)).reshape(*lead, heads, 1)
    if lower_bound is None:
        return -rate * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(rate * z)


def l2_normalize(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """``x / sqrt(sum x^2 + eps)`` over the last axis, wide; a zero row stays zero with a finite gradient."""
    x = wide(x)
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)
