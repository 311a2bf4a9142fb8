"""Precision helpers shared by the ops."""

import jax
import jax.numpy as jnp


def wide(x: jax.Array) -> jax.Array:
    """``x`` in float32, or in float64 where it is float64 already (golden tests in x64)."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
