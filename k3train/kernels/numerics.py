"""Precision helpers shared by the ops."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def wide_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Float32, or float64 for float64: the type in which sums over ``dtype`` are held."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def wide(x: jax.Array) -> jax.Array:
    """``x`` in float32, or in float64 where it is float64 already (golden tests in x64)."""
    return x.astype(wide_dtype(x.dtype))
