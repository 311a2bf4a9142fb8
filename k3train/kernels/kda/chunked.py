"""The delta rule by chunks (k3-facts 2.3), exact for any decay between 0 and 1, 0 and 1 included.

Notation of the facts: inside a chunk E_ij is the decay from token j to token i, product of the factors of
tokens j+1..i. A_ij = beta_i k_i E_ij k_j for i > j, X = (I + A)^-1, P_ij = q_i E_ij k_j for i >= j.

E_ij is never a quotient, nor an exponential of a difference of sums. Blocks of b tokens are joined in pairs: a
row i of the later block and a column j of the earlier one meet at the seam, E_ij = (product from the seam to i)
times (product from after j to the seam), two factors in [0, 1]. So the scores are matrix products, nothing
overflows however strong the decay, a factor of 0 cuts documents apart exactly, and no token's arithmetic depends
on a later token. The same joins invert I + A: X21 = -X22 A21 X11.

B rows, N chunks, C tokens of a chunk, n pairs of blocks, b tokens of a block, H heads, K/V key/value width.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    precision: lax.PrecisionLike,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Same arguments and results as :func:`k3train.kernels.kda.reference.recurrent`, and ``chunk``, a power of two.

    Work inside chunks is batched over all of them; only one [K, K] x [K, V] product a chunk is sequential.
    """
    tokens = q.shape[1]
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    q, k, v, beta = (_cut(x, chunk, 0) for x in (q, k, v, beta[..., None]))  # [B, H, N, C, .]
    decay = _cut(decay, chunk, 1)
    inverse, scores, prefix, suffix = _pairs(q, k, decay, beta, precision)
    matmul = partial(jnp.matmul, precision=precision)

    width = k.shape[-1]
    wu = matmul(inverse, jnp.concatenate([beta * prefix * k, beta * v], axis=-1))
    w, u = wu[..., :width], wu[..., width:]
    update = matmul(jnp.swapaxes(k * suffix, -1, -2), wu)  # [B, H, N, K, K+V]
    eye = jnp.eye(width, dtype=k.dtype)[None, None, None]
    transition = prefix[..., -1, :, None] * eye - update[..., :width]
    starts, state = _states(transition, update[..., width:], state, precision)

    written = u - matmul(w, starts)
    o = matmul(q * prefix, starts) + matmul(scores, written)
    o = jnp.moveaxis(o, 1, 3)  # [B, N, C, H, V]
    return o.reshape(o.shape[0], -1, *o.shape[3:])[:, :tokens], state


def _cut(x: jax.Array, chunk: int, fill: int) -> jax.Array:
    """[B, T, H, D] to [B, H, N, C, D]; ``fill`` past the end: beta 0 and decay 1 leave the state as it is."""
    batch, tokens, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -tokens % chunk), (0, 0), (0, 0)), constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, -1, chunk, heads, width), 3, 1)


def _pairs(
    q: jax.Array, k: jax.Array, decay: jax.Array, beta: jax.Array, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """X [.., C, C], P [.., C, C], and the decay of each token since the chunk's start and until its end [.., C, K]."""
    lead, (size, width) = k.shape[:-2], k.shape[-2:]
    matmul = partial(jnp.matmul, precision=precision)
    inverse = jnp.ones((*lead, size, 1, 1), k.dtype)
    scores = jnp.sum(q * k, axis=-1)[..., None, None]
    prefix, suffix = decay, jnp.ones_like(decay)  # inclusive, exclusive; within blocks of b
    b = 1
    while b < size:
        halves = (*lead, size // (2 * b), 2, b)
        pre, suf = prefix.reshape(*halves, width), suffix.reshape(*halves, width)
        late = pre[..., 1, :, :]  # [.., n, b, K]
        columns = k.reshape(*halves, width)[..., 0, :, :] * suf[..., 0, :, :]
        q_rows = q.reshape(*halves, width)[..., 1, :, :] * late
        k_rows = k.reshape(*halves, width)[..., 1, :, :] * late
        rows = jnp.concatenate([q_rows, k_rows], axis=-2)
        seam = jnp.einsum("...ik,...jk->...ij", rows, columns, precision=precision)  # [.., n, 2b, b]
        a = seam[..., b:, :] * beta.reshape(*halves, 1)[..., 1, :, :]

        x = inverse.reshape(*halves, b)
        x_early, x_late = x[..., 0, :, :], x[..., 1, :, :]
        inverse = _join(x_early, -matmul(matmul(x_late, a), x_early), x_late)
        p = scores.reshape(*halves, b)
        scores = _join(p[..., 0, :, :], seam[..., :b, :], p[..., 1, :, :])

        whole_early, whole_late = pre[..., 0, -1:, :], pre[..., 1, -1:, :]
        one = jnp.ones_like(whole_early)
        prefix = (pre * jnp.stack([one, whole_early], axis=-3)).reshape(prefix.shape)
        suffix = (suf * jnp.stack([whole_late, one], axis=-3)).reshape(suffix.shape)
        b *= 2
    return inverse[..., 0, :, :], scores[..., 0, :, :], prefix, suffix


def _join(early: jax.Array, across: jax.Array, late: jax.Array) -> jax.Array:
    """[[early, 0], [across, late]], each [.., b, b]."""
    top = jnp.concatenate([early, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([across, late], axis=-1)], axis=-2)


def _states(
    transition: jax.Array, written: jax.Array, state: jax.Array, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    """S' = M S + B over chunks: M [B, H, N, K, K], B [B, H, N, K, V] to each chunk's S [B, H, N, K, V] and the last."""

    def step(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.matmul(chunk[0], state, precision=precision) + chunk[1], state

    state, starts = lax.scan(step, state, (jnp.moveaxis(transition, 2, 0), jnp.moveaxis(written, 2, 0)))
    return jnp.moveaxis(starts, 0, 2), state
