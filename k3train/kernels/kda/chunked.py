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
    tokens, width = q.shape[1], k.shape[-1]
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    q, k, v, beta = (_cut(x, chunk, 0) for x in (q, k, v, beta[..., None]))  # [B, H, N, C, .]
    decay = _cut(decay, chunk, 1)
    scores, a, seams, prefix, suffix = _pairs(q, k, decay, beta, precision)
    inverse = _inverse(a, lax.stop_gradient(seams), precision)

    matmul = partial(jnp.matmul, precision=precision)
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
) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array, jax.Array]:
    """What pairs of tokens of a chunk have to do with each other.

    Returns:
      P [.., C, C]; A [.., C, C]; A's block at every seam [.., n, b, b] for b = 1, 2, 4, ..; the decay of each token
      since before the chunk's first [.., C, K], and from each token until the chunk's end [.., C, K].
    """
    scores = jnp.sum(q * k, axis=-1)[..., None, None]
    a = jnp.zeros_like(scores)
    prefix, suffix = decay, jnp.ones_like(decay)  # within blocks of b; inclusive, exclusive
    seams, b = [], 1
    while b < k.shape[-2]:
        prefix_early, prefix_late = _blocks(prefix, b)
        suffix_early, suffix_late = _blocks(suffix, b)
        k_early, k_late = _blocks(k, b)
        q_late, beta_late = _blocks(q, b)[1], _blocks(beta, b)[1]

        rows = jnp.concatenate([q_late * prefix_late, k_late * prefix_late], axis=-2)  # [.., n, 2b, K]
        seam = jnp.einsum("...ik,...jk->...ij", rows, k_early * suffix_early, precision=precision)
        seam_scores, seam_a = jnp.split(seam, 2, axis=-2)  # [.., n, b, b]
        seam_a = seam_a * beta_late
        seams.append(seam_a)
        scores, a = _join(scores, seam_scores), _join(a, seam_a)

        prefix = _unblock(prefix_early, prefix_late * prefix_early[..., -1:, :])
        suffix = _unblock(suffix_early * prefix_late[..., -1:, :], suffix_late)
        b *= 2
    return scores[..., 0, :, :], a[..., 0, :, :], seams, prefix, suffix


def _blocks(x: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """[.., C, D] to the earlier and the later blocks of each pair, [.., n, b, D]."""
    return _early_late(x.reshape(*x.shape[:-2], -1, b, x.shape[-1]))


def _early_late(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[.., 2n, b, D] to twice [.., n, b, D]; a split, since its transpose is one concatenation, not two paddings."""
    pairs = blocks.reshape(*blocks.shape[:-3], -1, 2, *blocks.shape[-2:])
    early, late = jnp.split(pairs, 2, axis=-3)
    return jnp.squeeze(early, axis=-3), jnp.squeeze(late, axis=-3)


def _unblock(early: jax.Array, late: jax.Array) -> jax.Array:
    """The reverse of :func:`_blocks`."""
    x = jnp.stack([early, late], axis=-3)
    return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def _join(blocks: jax.Array, across: jax.Array) -> jax.Array:
    """Pairs of diagonal blocks [.., 2n, b, b] and what lies below them [.., n, b, b] to blocks [.., n, 2b, 2b]."""
    early, late = _early_late(blocks)
    top = jnp.concatenate([early, jnp.zeros_like(across)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([across, late], axis=-1)], axis=-2)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _inverse(a: jax.Array, seams: list[jax.Array], precision: lax.PrecisionLike) -> jax.Array:
    """X = (I + A)^-1 from A's blocks at the seams; the gradient goes to A itself, -X^T dX X^T (k3-facts 2.4).

    Every block formed is the exact inverse of one of I + A's own: with keys of at most unit length and beta at most 1
    nothing larger than the result arises, as it does in products of powers of A.
    """
    matmul = partial(jnp.matmul, precision=precision)
    x = jnp.ones((*a.shape[:-1], 1, 1), a.dtype)
    for seam in seams:
        early, late = _early_late(x)
        x = _join(x, -matmul(matmul(late, seam), early))
    return x[..., 0, :, :]


def _inverse_fwd(a: jax.Array, seams: list[jax.Array], precision: lax.PrecisionLike):
    x = _inverse(a, seams, precision)
    return x, (x, seams)


def _inverse_bwd(precision: lax.PrecisionLike, saved: tuple[jax.Array, list[jax.Array]], dx: jax.Array):
    x, seams = saved
    matmul = partial(jnp.matmul, precision=precision)
    transposed = jnp.swapaxes(x, -1, -2)
    return -matmul(matmul(transposed, dx), transposed), jax.tree.map(jnp.zeros_like, seams)


_inverse.defvjp(_inverse_fwd, _inverse_bwd)


def _states(
    transition: jax.Array, written: jax.Array, state: jax.Array, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    """S' = M S + B over chunks: M [B, H, N, K, K], B [B, H, N, K, V] to each chunk's S [B, H, N, K, V] and the last."""

    def step(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return jnp.matmul(chunk[0], state, precision=precision) + chunk[1], state

    state, starts = lax.scan(step, state, (jnp.moveaxis(transition, 2, 0), jnp.moveaxis(written, 2, 0)))
    return jnp.moveaxis(starts, 0, 2), state
