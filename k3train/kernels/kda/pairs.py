"""Decay between the tokens of a chunk, as products of factors in [0, 1], and the products of q and k under it.

E_ij is the decay from token j to token i, the product of the factors of tokens j+1..i. It is never a quotient, nor
an exponential of a difference of sums. Blocks of b tokens are joined r at a time, b = 1 first: token i of block a
and token j of an earlier block c meet at the start of a, E_ij = (factors from there to i) times (factors of the whole
blocks between) times (factors from after j to the end of c). So pairs are matrix products, nothing overflows however
strong the decay, a factor of 0 cuts documents apart exactly, and no token's arithmetic depends on a later token.

The gradient of a factor's logarithm is the sum over the pairs whose decay holds it, added up without differences:
what does not reach across token t has no part in t's gradient, in no bit.

.. leading axes, C tokens of a chunk, n groups of r blocks of b tokens (C = n r b), K key width, Z rows' kinds (q, k).
"""

from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RADIX = 4


class Stage(NamedTuple):
    """How tokens of different blocks of a group meet."""

    head: jax.Array
    """[.., n, r, b, K] decay from the start of the block to the token, the token included."""
    tail: jax.Array | None
    """[.., n, r, b, K] decay from after the token to the end of the block; None for blocks of one token."""
    between: jax.Array
    """[.., n, r-1, r-1, K] decay from the end of block c to the start of block a, a = 1..r-1, c = 0..r-2; else 0."""

    @property
    def size(self) -> int:
        """Tokens of a group."""
        r, b = self.head.shape[-3:-1]
        return r * b

    def later(self, rows: jax.Array) -> jax.Array:
        """Rows [.., Z, C, K] as later tokens meet their seams: [.., n, r-1, Zb, K]."""
        *lead, n, r, b, width = self.head.shape
        rows = rows.reshape(*lead, -1, n, r, b, width)[..., 1:, :, :] * self.head[..., None, :, 1:, :, :]
        return jnp.moveaxis(rows, -5, -3).reshape(*lead, n, r - 1, -1, width)

    def earlier(self, k: jax.Array) -> jax.Array:
        """k [.., C, K] as it meets the seam before each later block: [.., n, r-1, (r-1)b, K]."""
        k = self.times_tail(k.reshape(self.head.shape))[..., None, :-1, :, :] * self.between[..., None, :]
        return k.reshape(*k.shape[:-3], -1, k.shape[-1])

    def times_tail(self, x: jax.Array) -> jax.Array:
        """x [.., n, r, b, K] decayed to the end of the block."""
        return x if self.tail is None else x * self.tail


class Logs(NamedTuple):
    """Gradients of the logarithms of decays inside blocks, both [.., C, K]."""

    head: jax.Array
    tail: jax.Array


def stages_of(decay: jax.Array) -> tuple[list[Stage], jax.Array, jax.Array]:
    """The stages of a chunk [.., C, K], C a power of two, smallest blocks first.

    Returns:
      Also the chunk's own head and tail, [.., C, K].
    """
    *lead, chunk, width = decay.shape
    head, tail = decay, None
    stages, b = [], 1
    while b < chunk:
        r = min(RADIX, chunk // b)
        head, tail = jax.tree.map(lambda x, r=r, b=b: x.reshape(*lead, -1, r, b, width), (head, tail))
        whole = [head[..., m, -1, :] for m in range(r)]  # [.., n, K]
        one = jnp.ones_like(whole[0])
        # span[c][a - c]: decay over the blocks c..a-1
        span = [list(accumulate([one, *whole[c:]], jnp.multiply)) for c in range(r + 1)]
        zero = jnp.zeros_like(one)
        between = [span[c + 1][a - c - 1] if c < a else zero for a in range(1, r) for c in range(r - 1)]
        between = jnp.stack(between, axis=-2).reshape(*one.shape[:-1], r - 1, r - 1, width)
        before = jnp.stack([span[0][a] for a in range(r)], axis=-2)[..., None, :]
        after = jnp.stack([span[c + 1][-1] for c in range(r)], axis=-2)[..., None, :]
        # Kept apart, lest they be computed again in every product that needs them.
        stage = Stage(*lax.optimization_barrier((head, tail, between)))
        stages.append(stage)
        head, tail = stage.head * before, stage.times_tail(after)
        b *= r
    tail = jnp.ones_like(decay) if tail is None else tail.reshape(decay.shape)
    return stages, head.reshape(decay.shape), tail


def products(rows: jax.Array, k: jax.Array, stage: Stage, precision: lax.PrecisionLike) -> jax.Array:
    """``sum_d row_i E_ij k_j`` over the stage's pairs, of rows [.., Z, C, K]: [.., n, Z, rb, rb], elsewhere 0."""
    later, earlier = stage.later(rows), stage.earlier(k)
    out = jnp.einsum("...ik,...jk->...ij", later, earlier, precision=precision)  # [.., n, r-1, Zb, (r-1)b]
    inner = out.shape[-1]
    b = stage.size - inner
    out = jnp.moveaxis(out.reshape(*out.shape[:-2], -1, b, inner), -3, -4)  # [.., n, Z, r-1, b, (r-1)b]
    return jnp.pad(out.reshape(*out.shape[:-3], inner, inner), [(0, 0)] * (out.ndim - 3) + [(b, 0), (0, b)])


def products_bwd(
    rows: jax.Array, k: jax.Array, d_out: jax.Array, stage: Stage, logs: Logs, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array, Logs]:
    """Gradients of :func:`products`.

    Args:
      d_out: [.., n, Z, rb, rb].
      logs: gradients of the logarithms of decays inside the stage's groups.

    Returns:
      Gradients of rows, of k, and of the logarithms inside the stage's blocks.
    """
    r, b = stage.head.shape[-3:-1]
    pad = [(0, 0)] * (stage.head.ndim - 3)
    earlier, later = stage.earlier(k), stage.later(rows)
    d_out = d_out[..., b:, :-b].reshape(*d_out.shape[:-2], r - 1, b, -1)
    d_out = jnp.moveaxis(d_out, -4, -3).reshape(*later.shape[:-1], -1)  # [.., n, r-1, Zb, (r-1)b]
    d_later = jnp.einsum("...ij,...jk->...ik", d_out, earlier, precision=precision)
    d_later = jnp.moveaxis(d_later.reshape(*later.shape[:-2], -1, b, later.shape[-1]), -3, -5)
    d_rows = jnp.pad(d_later, [(0, 0), *pad, (1, 0), (0, 0), (0, 0)])
    d_rows = (d_rows * stage.head[..., None, :, :, :, :]).reshape(rows.shape)

    d_earlier = jnp.einsum("...ij,...ik->...jk", d_out, later, precision=precision)
    blocked = (*stage.between.shape[:-1], b, -1)  # [.., n, r-1, r-1, b, K], later block first
    across = jnp.sum((d_earlier * earlier).reshape(blocked), axis=-2)
    d_k = jnp.sum(d_earlier.reshape(blocked) * stage.between[..., None, :], axis=-4)
    d_k = stage.times_tail(jnp.pad(d_k, [*pad, (0, 1), (0, 0), (0, 0)])).reshape(k.shape)
    logs = _inside(logs, across, stage)
    return d_rows, d_k, Logs(logs.head + jnp.sum(d_rows * rows, axis=-3), logs.tail + d_k * k)


def _inside(logs: Logs, across: jax.Array, stage: Stage) -> Logs:
    """Gradients inside a stage's blocks from those inside its groups.

    A decay inside a group is one inside a block times those of whole blocks, and a whole block's is the head of its
    last token.

    Args:
      across: of the logarithms of ``stage.between``, [.., n, r-1, r-1, K].
    """
    r, b = stage.head.shape[-3:-1]
    heads, tails = (jnp.sum(x.reshape(stage.head.shape), axis=-2) for x in logs)  # [.., n, r, K]
    whole = []
    for m in range(r):
        parts = [across[..., a - 1, c, :] for a in range(m + 1, r) for c in range(m)]
        parts += [heads[..., a, :] for a in range(m + 1, r)] + [tails[..., c, :] for c in range(m)]
        whole.append(sum(parts))
    whole = jnp.stack(whole, axis=-2)[..., None, :]  # [.., n, r, 1, K]
    last = mask(np.arange(b)[:, None] == b - 1, whole.ndim)
    head = logs.head.reshape(stage.head.shape) + jnp.where(last, whole, 0)
    return Logs(head.reshape(logs.head.shape), logs.tail)


def diagonal(x: jax.Array, b: int) -> jax.Array:
    """The diagonal blocks [.., nr, Z, b, b] of x [.., n, Z, rb, rb]."""
    *lead, n, z, size, _ = x.shape
    r = size // b
    own = mask(np.eye(r, dtype=bool)[:, None, :, None], x.ndim + 2)
    x = jnp.sum(jnp.where(own, x.reshape(*lead, n, z, r, b, r, b), 0), axis=-2)  # [.., n, Z, r, b, b]
    return jnp.moveaxis(x, -3, -4).reshape(*lead, n * r, z, b, b)


def place(blocks: jax.Array, group: jax.Array) -> jax.Array:
    """``group`` [.., n, rb, rb] with ``blocks`` [.., nr, b, b] on its diagonal."""
    *lead, n, size, _ = group.shape
    b = blocks.shape[-1]
    r = size // b
    group = group.reshape(*lead, n, r, b, r, b)
    own = mask(np.eye(r, dtype=bool)[:, None, :, None], group.ndim)
    return jnp.where(own, blocks.reshape(*lead, n, r, b, 1, b), group).reshape(*lead, n, size, size)


def mask(x: np.ndarray, rank: int) -> jax.Array:
    """``x``, of truth values, with leading axes of 1 up to ``rank``."""
    return jnp.asarray(x).reshape(*(1,) * (rank - x.ndim), *x.shape)
