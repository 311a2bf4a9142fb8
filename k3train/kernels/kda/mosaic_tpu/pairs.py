"""Decay between the tokens of one chunk, the pair products under it, and their gradients, on two-dimensional tiles.

As in ``kernels/kda/pairs.py``, E_ij, the decay from token j to token i, is a product of factors in [0, 1] and never a
quotient or an exponential of a difference. Only the joints differ, to suit tiles of 8 rows: inside a block of 16 tokens
the pairs s tokens apart are one product of rows (E_s, grown by one factor as s grows); token i of a later block meets
all earlier blocks at the start of its own, in a matrix product.

C tokens of a chunk, K key width; q is scaled, bk is beta k.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

CHUNK, BLOCK = 64, 16
BLOCKS = CHUNK // BLOCK
# Dimensions that a product sums over: x y, x y^T and x^T y.
NN, NT, TN = ((1,), (0,)), ((1,), (1,)), ((0,), (0,))


class Decays(NamedTuple):
    """Decay over stretches of a chunk, each in [0, 1]."""

    head: jax.Array
    """[C, K] from the start of a token's block to the token, the token included."""
    band: tuple[jax.Array, ...]
    """For s = 1..15, [C, K]: from token i-s to token i where both lie in one block, else 0."""
    tails: tuple[jax.Array, ...]
    """For the end of block 0..3, [16 to C, K]: from after a token to there."""
    start: jax.Array
    """[C, K] from the start of the chunk to a token."""
    whole: jax.Array
    """[1, K] over the chunk."""

    @property
    def end(self) -> jax.Array:
        """[C, K] from after a token to the end of the chunk."""
        return self.tails[-1]


def dot(x: jax.Array, y: jax.Array, dims: tuple, precision: lax.PrecisionLike) -> jax.Array:
    """A float32 product of two tiles, summed over ``dims``."""
    return lax.dot_general(x, y, (dims, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def index(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Each entry's row (axis 0) or column (axis 1)."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def column(row: jax.Array) -> jax.Array:
    """[1, C] to [C, 1], exactly."""
    square = (row.shape[1], row.shape[1])
    return jnp.sum(jnp.where(index(square, 0) == index(square, 1), row, 0.0), axis=1, keepdims=True)


def row(column: jax.Array) -> jax.Array:
    """[C, 1] to [1, C], exactly."""
    square = (column.shape[0], column.shape[0])
    return jnp.sum(jnp.where(index(square, 0) == index(square, 1), column, 0.0), axis=0, keepdims=True)


def decays_of(factor: jax.Array) -> Decays:
    """All that pairs and states need, from each token's own decay [C, K]."""
    place = index(factor.shape, 0) % BLOCK
    head, tail = factor, jnp.where(place < BLOCK - 1, _up(factor, 1), 1.0)
    step = 1
    while step < BLOCK:  # products over twice as many tokens each time
        head = head * jnp.where(place >= step, _down(head, step), 1.0)
        tail = tail * jnp.where(place + step < BLOCK, _up(tail, step), 1.0)
        step *= 2
    band = [jnp.where(place >= 1, factor, 0.0)]
    for s in range(2, BLOCK):
        band.append(jnp.where(place >= s, band[-1] * _down(factor, s - 1), 0.0))
    start, tails, whole = [], [], jnp.ones_like(factor[:1])
    for m in range(BLOCKS):
        start.append(_block(head, m) * whole)
        over = head[(m + 1) * BLOCK - 1 : (m + 1) * BLOCK]  # this block as a whole, [1, K]
        tails.append(jnp.concatenate([*(t * over for t in tails[-1:]), _block(tail, m)]))
        whole = whole * over
    return Decays(head, tuple(band), tuple(tails), jnp.concatenate(start), whole)


def products(
    q: jax.Array, bk: jax.Array, k: jax.Array, decays: Decays, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    """P_ij = q_i E_ij k_j for i >= j and A_ij = bk_i E_ij k_j for i > j, both [C, C] and 0 elsewhere."""
    none = jnp.zeros((BLOCK, CHUNK), jnp.float32)
    strips = [(none, none)]
    for m in range(1, BLOCKS):
        strip = dot(_later(q, bk, decays, m), _earlier(k, decays, m), NT, precision)  # [32, C]
        strips.append((strip[:BLOCK], strip[BLOCK:]))
    scores, a = (jnp.concatenate(parts) for parts in zip(*strips, strict=True))
    apart = index(scores.shape, 0) - index(scores.shape, 1)
    scores = scores + jnp.where(apart == 0, _sum(q * k), 0.0)
    for s, decay in enumerate(decays.band, start=1):
        seen = _down(k, s) * decay
        scores = scores + jnp.where(apart == s, _sum(q * seen), 0.0)
        a = a + jnp.where(apart == s, _sum(bk * seen), 0.0)
    return scores, a


class Gradients(NamedTuple):
    """What :func:`products_bwd` returns, all [C, K] but ``across``."""

    q: jax.Array
    bk: jax.Array
    k: jax.Array
    log: jax.Array
    """Of the logarithms of the tokens' decays: the part of pairs inside a block."""
    heads: jax.Array
    """Of the logarithm of ``Decays.head``."""
    across: tuple[jax.Array, ...]
    """Of the logarithms of ``Decays.tails``, but the last."""


def products_bwd(
    q: jax.Array,
    bk: jax.Array,
    k: jax.Array,
    d_scores: jax.Array,
    d_a: jax.Array,
    decays: Decays,
    precision: lax.PrecisionLike,
) -> Gradients:
    """Gradients of :func:`products` from those of P and A, [C, C], whose entries where P and A are 0 do not matter."""
    none = jnp.zeros((BLOCK, k.shape[1]), jnp.float32)
    dq, d_bk, heads, across, dk = [none], [none], [none], [], jnp.zeros_like(k)
    for m in range(1, BLOCKS):
        later, earlier = _later(q, bk, decays, m), _earlier(k, decays, m)
        d_out = jnp.concatenate([_block(d_scores, m), _block(d_a, m)])  # [32, C]
        d_later = dot(d_out, earlier, NN, precision)
        log = d_later * later
        heads.append(log[:BLOCK] + log[BLOCK:])
        dq.append(d_later[:BLOCK] * _block(decays.head, m))
        d_bk.append(d_later[BLOCK:] * _block(decays.head, m))
        d_earlier = dot(d_out, later, TN, precision)  # [C, K], of which the rows before block m count
        dk = dk + d_earlier * _filled(decays.tails[m - 1])
        across.append(d_earlier * earlier)
    dq, d_bk, heads = (jnp.concatenate(parts) for parts in (dq, d_bk, heads))

    apart = index(d_scores.shape, 0) - index(d_scores.shape, 1)
    pick = lambda x, s: _sum(jnp.where(apart == s, x, 0.0))  # noqa: E731
    on_self = pick(d_scores, 0)
    dq, dk = dq + on_self * k, dk + on_self * q
    longer = log = jnp.zeros_like(k)  # longer: the pairs at least s apart
    for s in range(BLOCK - 1, 0, -1):
        of_q, of_bk, decay = pick(d_scores, s), pick(d_a, s), decays.band[s - 1]
        behind = _down(k, s)
        seen = behind * decay
        dq, d_bk = dq + of_q * seen, d_bk + of_bk * seen
        d_seen = (of_q * q + of_bk * bk) * decay
        dk = dk + _up(d_seen, s)
        longer = longer + d_seen * behind
        log = log + _up(longer, s - 1)  # all of them hold the decay of the token s-1 before
    return Gradients(dq, d_bk, dk, log, heads, tuple(across))


def spread(
    of_pairs: Gradients, starts: jax.Array, ends: jax.Array, whole: jax.Array, precision: lax.PrecisionLike
) -> jax.Array:
    """Gradients [C, K] of the logarithms of the tokens' decays: each sums, without differences, what holds the token.

    Args:
      of_pairs: what :func:`products_bwd` returns.
      starts: [C, K] of the logarithm of ``Decays.start``.
      ends: [C, K] of that of ``Decays.end``.
      whole: [1, K] of that of ``Decays.whole``.
      precision: of the product that sums.
    """
    stretches = jnp.concatenate([of_pairs.heads, starts, ends, *of_pairs.across])
    shape = (CHUNK, stretches.shape[0])
    t, kind, other = index(shape, 0), index(shape, 1) // CHUNK, index(shape, 1) % CHUNK
    # A head reaches back inside its block, a start to the first token; an end goes on to the last, a tail to its own.
    before_t = (kind == 2) | ((kind > 2) & (t < (kind - 2) * BLOCK))
    holds = (other >= t) & ((kind == 1) | ((kind == 0) & (other // BLOCK == t // BLOCK))) | (other < t) & before_t
    return of_pairs.log + whole + dot(jnp.where(holds, 1.0, 0.0), stretches, NN, precision)


def unit_lower_inverse(a: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """(I + A)^-1 of a strictly lower triangular A [C, C], joined from the exact inverses of its diagonal blocks.

    Neighbours of b tokens are joined at once, X21 = -X22 A21 X11 (``kernels/kda/triangular.py``).
    """
    i, j = index(a.shape, 0), index(a.shape, 1)
    matmul = partial(dot, dims=NN, precision=precision)
    seam = lambda b: jnp.where((i // b % 2 == 1) & (i // b == j // b + 1), a, 0.0)  # noqa: E731
    x, b = jnp.where(i == j, 1.0, 0.0) - seam(1), 2
    while b < CHUNK:
        x = x - matmul(matmul(x, seam(b)), x)
        b *= 2
    return x


def _later(q: jax.Array, bk: jax.Array, decays: Decays, m: int) -> jax.Array:
    """q and bk of block m, [32, K], as they meet earlier blocks at its start."""
    head = _block(decays.head, m)
    return jnp.concatenate([_block(q, m) * head, _block(bk, m) * head])


def _earlier(k: jax.Array, decays: Decays, m: int) -> jax.Array:
    """k [C, K] as it meets the start of block m; 0 from there on."""
    return k * _filled(decays.tails[m - 1])


def _filled(x: jax.Array) -> jax.Array:
    """``x`` with rows of 0 up to C."""
    return jnp.concatenate([x, jnp.zeros((CHUNK - x.shape[0], x.shape[1]), x.dtype)])


def _block(x: jax.Array, m: int) -> jax.Array:
    return x[m * BLOCK : (m + 1) * BLOCK]


def _down(x: jax.Array, by: int) -> jax.Array:
    """Row i of the result is row i - ``by``; the first ones come from the other end."""
    return pltpu.roll(x, by, 0) if by else x


def _up(x: jax.Array, by: int) -> jax.Array:
    """Row i of the result is row i + ``by``; the last ones come from the other end."""
    return pltpu.roll(x, CHUNK - by, 0) if by else x


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)
