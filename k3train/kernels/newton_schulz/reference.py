"""The Newton-Schulz iteration as written in k3-facts 9.1, one matrix at a time."""

import jax
import jax.numpy as jnp

from k3train.kernels.newton_schulz.api import COEFFICIENTS


def orthogonalize(matrix: jax.Array, steps: int = 5) -> jax.Array:
    """Of one non-zero matrix [n, m], in its own dtype; a tall matrix is transposed first."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonalize(matrix.T, steps).T
    a, b, c = COEFFICIENTS
    x = matrix / jnp.linalg.norm(matrix)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
