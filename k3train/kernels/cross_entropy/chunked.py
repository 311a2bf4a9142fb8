"""Cross entropy by chunks of the vocabulary and blocks of tokens; the backward pass scores them again.

N tokens in B blocks of b, D hidden, V vocabulary in chunks of C. The vocabulary is the outer loop: a chunk
of the head is fetched (and gathered over devices) once a pass and its gradient is complete when the inner
loop over tokens ends. Forward keeps four numbers a token: the running maximum and its place, the sum of
exponentials, the target's logit.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide_dtype

Sums = tuple[jax.Array, jax.Array, jax.Array]
Axes = tuple[str, ...]
LANES = 128
"""Chunks are a multiple of this many columns where the vocabulary allows."""


class Running(NamedTuple):
    """Per token, each [B, b]."""

    peak: jax.Array
    total: jax.Array
    """Sum of exp(logit - peak)."""
    best: jax.Array
    """Column of the peak."""
    target: jax.Array
    """Logit of the target, once its chunk has been seen."""


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    z_loss: float,
    chunk: int,
    token_block: int,
    axes: Axes = (),
) -> Sums:
    """(loss sum, z sum, correct) of ``api.cross_entropy``."""
    return _forward(hidden, head, targets, mask, z_loss, chunk, token_block, axes)[0]


def _forward(hidden, head, targets, mask, z_loss, chunk, token_block, axes):
    blocks = partial(_blocks, token_block=token_block)
    h, t, m = blocks(hidden), blocks(targets), blocks(mask)  # [B, b, D], [B, b], [B, b]
    dtype = wide_dtype(hidden.dtype)
    start = Running(
        jnp.full(t.shape, -jnp.inf, dtype),
        jnp.zeros(t.shape, dtype),
        jnp.zeros(t.shape, jnp.int32),
        jnp.zeros(t.shape, dtype),
    )

    def over_chunks(running: Running, index: jax.Array) -> tuple[Running, None]:
        weight, columns, fresh = _slice(head, index, chunk, hidden.dtype, axes)

        def over_tokens(_, block):
            h, t, running = block
            logits = _score(h, weight)  # [b, C]
            logits = jnp.where(fresh[None, :], logits, -jnp.inf)
            return None, _advance(running, logits, columns, t)

        return jax.lax.scan(over_tokens, None, (h, t, running))[1], None

    running, _ = jax.lax.scan(over_chunks, start, jnp.arange(_chunks(head.shape[1], chunk)[0], dtype=jnp.int32))
    lse = running.peak + jnp.log(running.total)  # [B, b]
    loss = jnp.sum(jnp.where(m, lse - running.target, 0))
    z = z_loss * jnp.sum(jnp.where(m, lse * lse, 0))
    correct = jnp.sum(m & (running.best == t), dtype=jnp.int32)
    return (loss, z, correct), (hidden, head, targets, mask, lse)


def _advance(running: Running, logits: jax.Array, columns: jax.Array, targets: jax.Array) -> Running:
    """Takes in one chunk's logits [b, C] of columns [C]; entries of -inf are not there."""
    here = jnp.max(logits, axis=-1)
    peak = jnp.maximum(running.peak, here)
    total = running.total * jnp.exp(running.peak - peak) + jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1)
    best = jnp.where(here > running.peak, columns[0] + jnp.argmax(logits, axis=-1).astype(jnp.int32), running.best)
    hit = (columns[None, :] == targets[:, None]) & (logits > -jnp.inf)
    target = running.target + jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    return Running(peak, total, best, target)


def _backward(z_loss, chunk, token_block, axes, saved, cotangents):
    hidden, head, targets, mask, lse = saved
    g_loss, g_z, _ = cotangents
    blocks = partial(_blocks, token_block=token_block)
    h, t, m = blocks(hidden), blocks(targets), blocks(mask)
    # d loss / d logit = p - [target], d z / d logit = 2 z_loss lse p.
    on_p = jnp.where(m, g_loss + 2 * z_loss * g_z * lse, 0)  # [B, b]
    on_target = jnp.where(m, g_loss, 0)

    def over_chunks(carry, index):
        d_hidden, d_head = carry
        weight, columns, fresh = _slice(head, index, chunk, hidden.dtype, axes)
        weight_fresh = jnp.where(fresh[None, :], weight, 0)  # columns of the overlap count once in d_hidden

        def over_tokens(d_weight, block):
            h, t, lse, on_p, on_target, d_h = block
            p = jnp.exp(_score(h, weight) - lse[:, None])  # [b, C]
            hit = columns[None, :] == t[:, None]
            d_logits = on_p[:, None] * p - jnp.where(hit, on_target[:, None], 0)
            d_logits = d_logits.astype(hidden.dtype)
            d_h = d_h + _dot("bc,dc->bd", d_logits, weight_fresh)
            return d_weight + _dot("bd,bc->dc", h, d_logits), d_h

        d_weight, d_hidden = jax.lax.scan(
            over_tokens, jnp.zeros(weight.shape, d_hidden.dtype), (h, t, lse, on_p, on_target, d_hidden)
        )
        if axes:
            d_weight = jax.lax.psum_scatter(d_weight, axes, scatter_dimension=0, tiled=True)
        # The overlap's gradient is the same in both chunks, so writing it twice is right.
        d_head = jax.lax.dynamic_update_slice_in_dim(d_head, d_weight.astype(head.dtype), columns[0], axis=1)
        return (d_hidden, d_head), None

    start = jnp.zeros(h.shape, lse.dtype), jnp.zeros_like(head)
    (d_hidden, d_head), _ = jax.lax.scan(
        over_chunks, start, jnp.arange(_chunks(head.shape[1], chunk)[0], dtype=jnp.int32)
    )
    return _unblocked(d_hidden, hidden.shape[0]).astype(hidden.dtype), d_head, None, None


cross_entropy.defvjp(_forward, _backward)


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of operands in their own dtype, accumulated wide."""
    return jnp.einsum(equation, a, b, preferred_element_type=wide_dtype(a.dtype))


def _score(hidden: jax.Array, weight: jax.Array) -> jax.Array:
    """Wide logits [b, C]."""
    return _dot("bd,dc->bc", hidden, weight)


def _chunks(vocab: int, chunk: int) -> tuple[int, int]:
    """(number of chunks, columns in each): evened out, so that the last overlaps its neighbour little."""
    count = -(-vocab // min(chunk, vocab))
    even = -(-vocab // count)
    return count, min(-(-even // LANES) * LANES, max(chunk, even), vocab)


def _slice(
    head: jax.Array, index: jax.Array, chunk: int, dtype: jnp.dtype, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunk ``index``: weights [D, C], column numbers [C], and which columns no chunk before had [C].

    The last chunk is moved left to end with the vocabulary, so the head needs no padded copy.
    """
    _, size = _chunks(head.shape[1], chunk)
    first = jnp.minimum(index * size, head.shape[1] - size)
    columns = first + jnp.arange(size, dtype=jnp.int32)
    weight = jax.lax.dynamic_slice_in_dim(head, first, size, axis=1).astype(dtype)
    if axes:
        weight = jax.lax.all_gather(weight, axes, axis=0, tiled=True)
    return weight, columns, columns >= index * size


def _blocks(x: jax.Array, token_block: int) -> jax.Array:
    """[N, ...] -> [B, b, ...], block i holding tokens i, i + B, i + 2B, ...; zeros fill up the last ones."""
    count = -(-x.shape[0] // token_block)
    size = -(-x.shape[0] // count)
    x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return jnp.swapaxes(x.reshape(size, count, *x.shape[1:]), 0, 1)


def _unblocked(x: jax.Array, tokens: int) -> jax.Array:
    """The inverse of :func:`_blocks` for [B, b, D]."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, x.shape[-1])[:tokens]
