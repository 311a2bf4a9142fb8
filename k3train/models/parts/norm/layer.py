"""Root-mean-square normalisation: ``RMS(x; w) = w * x / sqrt(mean(x^2) + eps)`` over the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.numerics import wide
from k3train.models.param import ones, param


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of ``x`` [..., D] with ``weight`` [D], computed wide (k3-facts, notation).

    Returns:
      [..., D] in the dtype of ``x``.
    """
    x_wide = wide(x)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True) + eps)  # [..., 1]
    weight = jnp.broadcast_to(weight.astype(x_wide.dtype), x.shape)
    return (x_wide * scale * weight).astype(x.dtype)


class RMSNorm(nnx.Module):
    """RMSNorm with a learned weight [size] that starts at one."""

    def __init__(self, size: int, eps: float, *, rngs: nnx.Rngs, axes: tuple[str | None, ...] = ("embed",)):
        self.eps = eps
        self.weight = param(rngs, (size,), ones, axes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises ``x`` [..., size]; the result has the dtype of ``x``."""
        return rms_norm(x, self.weight[...], self.eps)
