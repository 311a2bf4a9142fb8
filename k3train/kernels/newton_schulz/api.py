"""Nearly orthogonal factor of a matrix by the quintic Newton-Schulz iteration, for Muon (k3-facts 9.1)."""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of X <- aX + (bA + cA^2)X with A = XX^T; drives singular values into about [0.7, 1.2]."""


def orthogonalize(m: jax.Array, steps: int = 5, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Replaces the singular values of each matrix by values near 1.

    Args:
      m: [..., n, m] matrices; leading axes are a batch.
      steps: iterations.
      dtype: precision of the products; normalisation is wide.

    Returns:
      [..., n, m] in ``m``'s wide dtype. The result does not depend on the scale of the input, and an
      all-zero matrix gives zeros.
    """
    x = _normalized(wide(m))
    out_dtype = x.dtype
    x = x.astype(dtype)
    tall = x.shape[-2] > x.shape[-1]

    def step(_: int, x: jax.Array) -> jax.Array:
        a, b, c = COEFFICIENTS
        # The Gram matrix stands on the short side: XX^T for a wide matrix, X^TX for a tall one.
        if tall:
            gram = jnp.einsum("...nm,...nk->...mk", x, x)  # [..., m, m]
            poly = b * gram + c * jnp.einsum("...mk,...kj->...mj", gram, gram)
            return a * x + jnp.einsum("...nm,...mk->...nk", x, poly)
        gram = jnp.einsum("...nm,...km->...nk", x, x)  # [..., n, n]
        poly = b * gram + c * jnp.einsum("...nk,...kj->...nj", gram, gram)
        return a * x + jnp.einsum("...nk,...km->...nm", poly, x)

    # A loop keeps the program small: one body per shape, not one per iteration.
    return jax.lax.fori_loop(0, steps, step, x).astype(out_dtype)


def _normalized(x: jax.Array) -> jax.Array:
    """``x`` [..., n, m] over its Frobenius norm; zeros (and subnormal noise) stay finite."""
    peak = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
    # Divided by its largest entry first, so that squares of tiny gradients do not vanish; after that
    # the norm of a non-zero matrix is at least 1.
    x = x / jnp.where(peak > jnp.finfo(x.dtype).tiny, peak, 1)
    return x / jnp.maximum(jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)), 1)
