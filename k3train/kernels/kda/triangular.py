"""Inverse of I + A for strictly lower triangular A, joined from the inverses of diagonal blocks.

Every block formed is the exact inverse of one of I + A's own: with keys of at most unit length and beta at most 1
nothing larger than the result arises, as it does in high powers of A.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3train.kernels.kda.pairs import mask, place


def unit_lower_inverse(a: jax.Array, blocks: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """(I + D + A)^-1 [.., n, rb, rb], where ``blocks`` [.., nr, b, b] hold the inverses of I + D's diagonal blocks.

    A is 0 in those blocks and above. Neighbours are joined, X21 = -X22 A21 X11, all of them in one product; single
    tokens four at a time, by (I - A)(I + A^2), which four rows make exact.
    """
    size, b = a.shape[-1], blocks.shape[-1]
    x = place(blocks, jnp.zeros_like(a))
    if b == 1:
        dot = lambda x, y: jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)  # noqa: E731
        return dot(x - a, x + dot(a, a)) if size > 2 else x - a
    matmul = partial(jnp.matmul, precision=precision)
    row, column = np.ogrid[:size, :size]
    while b < size:
        seam = (row // b % 2 == 1) & (row // b == column // b + 1)
        x = x - matmul(matmul(x, jnp.where(mask(seam, a.ndim), a, 0)), x)
        b *= 2
    return x
