"""Causal attention in pure JAX that scores one block of query rows at a time, forward and backward.

Scores of a block stand against a static prefix of the keys. The row is cut into at most PREFIXES parts,
each a scan over its blocks whose keys end where the part ends: with four parts 5/8 of the square is
computed instead of all of it, and the compiled program does not grow with T. The backward pass is
written out (as in FlashAttention, arXiv 2205.14135): it needs the outputs and the log-sum of each row
only, and lets matmul operands stay in the input dtype where automatic differentiation would widen them.

Letters in shape comments: B rows, H heads, T tokens (padded to blocks), C a block's rows, S keys of a
prefix, Q key width, V value width. Inside, heads come before tokens.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide, wide_dtype

PREFIXES = 4


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float, block: int
) -> tuple[jax.Array, jax.Array]:
    """See :func:`k3train.kernels.attention.api.attention`."""
    tokens = q.shape[1]
    block = min(block, tokens)
    pad = -tokens % block
    # Padding is segment 0, which attends to nothing and is never seen: it comes last.
    q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
    segment_ids = jnp.pad(segment_ids, ((0, 0), (0, pad)))
    o, max_logit = _attention(q, k, v, segment_ids, scale, block)
    return o.swapaxes(1, 2)[:, :tokens], jax.lax.stop_gradient(max_logit)


def _parts(tokens: int, block: int) -> list[tuple[int, int]]:
    """(first block, blocks) of each part of the row; a part's keys end with its last block."""
    blocks = tokens // block
    parts = min(PREFIXES, blocks)
    edges = [i * blocks // parts for i in range(parts + 1)]
    return [(a, b - a) for a, b in pairwise(edges)]


def _rows(x: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """``block`` tokens of ``x`` [B, H, T, ...] from ``start``."""
    return jax.lax.dynamic_slice_in_dim(x, start, block, axis=2)


def _scores(q: jax.Array, k: jax.Array, segment_ids: jax.Array, start: jax.Array, scale: float) -> jax.Array:
    """Scaled scores [B, H, C, S], wide, of a block of queries that begins at ``start``; -inf where masked."""
    block, keys = q.shape[2], k.shape[2]
    s = scale * jnp.einsum("bhcd,bhsd->bhcs", q, k, preferred_element_type=wide_dtype(q.dtype))
    mine = jax.lax.dynamic_slice_in_dim(segment_ids, start, block, axis=1)  # [B, C]
    same = (mine[:, :, None] == segment_ids[:, None, :keys]) & (mine != 0)[:, :, None]  # [B, C, S]
    causal = (start + jnp.arange(block))[:, None] >= jnp.arange(keys)[None, :]  # [C, S]
    return jnp.where((same & causal[None])[:, None], s, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(q, k, v, segment_ids, scale, block):
    """q, k [B, H, T, Q], v [B, H, T, V] -> o [B, H, T, V] wide, max_logit [H] wide."""
    return _forward(q, k, v, segment_ids, scale, block)[0]


def _forward(q, k, v, segment_ids, scale, block):
    outs, sums, tops = [], [], []

    def step(k, v, _, i):
        start = i * block
        s = _scores(_rows(q, start, block), k, segment_ids, start, scale)
        top = jnp.max(s, axis=-1)  # [B, H, C]
        shift = jnp.where(jnp.isneginf(top), 0.0, top)
        p = jnp.exp(s - shift[..., None])
        total = jnp.sum(p, axis=-1)  # [B, H, C]
        o = jnp.einsum("bhcs,bhsd->bhcd", p.astype(v.dtype), v, preferred_element_type=s.dtype)
        total = jnp.where(total == 0, 1.0, total)
        return None, (o / total[..., None], shift + jnp.log(total), jnp.max(top, axis=(0, 2)))

    for first, count in _parts(q.shape[2], block):
        keys = (first + count) * block
        body = partial(step, k[:, :, :keys], v[:, :, :keys])
        _, (o, log_sum, top) = jax.lax.scan(body, None, jnp.arange(first, first + count))
        outs.append(_unblock(o))
        sums.append(_unblock(log_sum))
        tops.append(jnp.max(top, axis=0))
    o, log_sum = jnp.concatenate(outs, axis=2), jnp.concatenate(sums, axis=2)
    max_logit = jnp.max(jnp.stack(tops), axis=0)
    max_logit = jnp.where(jnp.isneginf(max_logit), 0.0, max_logit)
    return (o, max_logit), (q, k, v, segment_ids, o, log_sum)


def _unblock(x: jax.Array) -> jax.Array:
    """Blocks [n, B, H, C, ...] stacked by a scan, back in a row [B, H, n C, ...]."""
    x = jnp.moveaxis(x, 0, 2)  # [B, H, n, C, ...]
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _backward(scale, block, saved, cotangents):
    q, k, v, segment_ids, o, log_sum = saved
    do, _ = cotangents  # max_logit carries no gradient
    delta = jnp.sum(do * o, axis=-1)  # [B, H, T]
    do = do.astype(v.dtype)
    dot = partial(jnp.einsum, preferred_element_type=o.dtype)

    def step(k, v, carry, i):
        dk, dv = carry  # [B, H, S, Q], [B, H, S, V], wide
        start = i * block
        q_rows, do_rows = _rows(q, start, block), _rows(do, start, block)
        s = _scores(q_rows, k, segment_ids, start, scale)
        p = jnp.exp(s - _rows(log_sum, start, block)[..., None])  # [B, H, C, S]
        dp = dot("bhcd,bhsd->bhcs", do_rows, v)
        ds = (scale * p * (dp - _rows(delta, start, block)[..., None])).astype(q.dtype)
        dv = dv + dot("bhcs,bhcd->bhsd", p.astype(v.dtype), do_rows)
        dk = dk + dot("bhcs,bhcd->bhsd", ds, q_rows)
        return (dk, dv), dot("bhcs,bhsd->bhcd", ds, k).astype(q.dtype)

    dk, dv = jnp.zeros_like(wide(k)), jnp.zeros_like(wide(v))
    dqs = []
    for first, count in _parts(q.shape[2], block):
        keys = (first + count) * block
        body = partial(step, k[:, :, :keys], v[:, :, :keys])
        part, dq = jax.lax.scan(body, (dk[:, :, :keys], dv[:, :, :keys]), jnp.arange(first, first + count))
        dk, dv = (jnp.concatenate([new, old[:, :, keys:]], axis=2) for new, old in zip(part, (dk, dv), strict=True))
        dqs.append(_unblock(dq))
    return jnp.concatenate(dqs, axis=2), dk.astype(k.dtype), dv.astype(v.dtype), None


_attention.defvjp(_forward, _backward)
