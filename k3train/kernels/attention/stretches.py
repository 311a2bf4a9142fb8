"""Causal attention of some stretches of a row against the whole row, in pure JAX (context parallelism).

A device's queries are a few equal stretches that begin at places known only at run time; keys and values are the row's.
Query blocks are scored against key blocks one by one, up to the block in which the query block ends: the loop's length
depends on the place, so that work follows it. Sums are kept as in FlashAttention (arXiv 2205.14135), forward and
backward.

Letters in shape comments: B rows, H heads, S keys, n stretches of L queries, C queries of a block, D keys of a block,
Q key width, V value width. Inside, heads come before tokens.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.numerics import wide, wide_dtype


class Blocks(NamedTuple):
    """Queries in blocks, in the order of a scan."""

    q: jax.Array
    """[blocks, B, H, C, Q]"""
    start: jax.Array
    """[blocks] int32, place of the first query of each block in the row."""
    ids: jax.Array
    """[blocks, B, C] documents, 0 beyond a stretch's end."""


def attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, places: jax.Array, scale: float, block: int
) -> tuple[jax.Array, jax.Array]:
    """See :func:`k3train.kernels.attention.api.attention`."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    o, max_logit = _attention(q, k, v, segment_ids, places, scale, block)
    return o.swapaxes(1, 2), lax.stop_gradient(max_logit)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _attention(q, k, v, segment_ids, places, scale, block):
    """q [B, H, n L, Q], k [B, H, S, Q], v [B, H, S, V] -> o [B, H, n L, V] wide, max_logit [H] wide."""
    return _forward(q, k, v, segment_ids, places, scale, block)[0]


def _keys(k: jax.Array, v: jax.Array, segment_ids: jax.Array, block: int):
    """Keys, values and documents filled up to whole blocks with padding, and the block."""
    block = min(block, k.shape[2])
    pad = -k.shape[2] % block
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, pad), (0, 0))) for x in (k, v))
    return k, v, jnp.pad(segment_ids, ((0, 0), (0, pad))), block


def _cut(x: jax.Array, stretches: int, block: int) -> jax.Array:
    """[B, H, n L, ...] -> [n blocks, B, H, C, ...], zeros at the end of each stretch."""
    batch, heads, tokens = x.shape[:3]
    length = tokens // stretches
    size = min(block, length)
    x = x.reshape(batch, heads, stretches, length, *x.shape[3:])
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, -length % size),) + ((0, 0),) * (x.ndim - 4))
    x = x.reshape(batch, heads, -1, size, *x.shape[4:])
    return jnp.moveaxis(x, 2, 0)


def _uncut(x: jax.Array, stretches: int, tokens: int) -> jax.Array:
    """The inverse of :func:`_cut`."""
    x = jnp.moveaxis(x, 0, 2)  # [B, H, n blocks, C, ...]
    x = x.reshape(*x.shape[:2], stretches, -1, *x.shape[4:])[:, :, :, : tokens // stretches]
    return x.reshape(*x.shape[:2], tokens, *x.shape[4:])


def _blocks(q: jax.Array, segment_ids: jax.Array, places: jax.Array, block: int) -> Blocks:
    stretches = places.shape[0]
    length = q.shape[2] // stretches
    cut = _cut(q, stretches, block)
    size = cut.shape[3]
    inside = jnp.arange(cut.shape[0] // stretches, dtype=jnp.int32) * size
    within = inside[:, None] + jnp.arange(size, dtype=jnp.int32)[None]  # [blocks of a stretch, C]
    place = places[:, None, None] + within[None]
    ids = jnp.take(segment_ids, jnp.minimum(place, segment_ids.shape[1] - 1).reshape(-1), axis=1)
    ids = ids.reshape(ids.shape[0], -1, size)  # [B, blocks, C]
    live = jnp.broadcast_to((within < length)[None], place.shape).reshape(1, -1, size)
    ids = jnp.where(live, ids, 0)
    return Blocks(cut, (places[:, None] + inside[None]).reshape(-1), jnp.moveaxis(ids, 1, 0))


def _part(x: jax.Array, j: jax.Array, block: int, axis: int = 2) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, j * block, block, axis=axis)


def _scores(here: Blocks, k: jax.Array, ids: jax.Array, j: jax.Array, block: int, scale: float) -> jax.Array:
    """Scaled scores [B, H, C, D], wide, of a query block and key block ``j``; -inf where masked."""
    s = scale * jnp.einsum("bhcq,bhdq->bhcd", here.q, _part(k, j, block), preferred_element_type=wide_dtype(k.dtype))
    keys = _part(ids, j, block, axis=1)
    same = (here.ids[:, :, None] == keys[:, None]) & (here.ids != 0)[:, :, None]  # [B, C, D]
    place = here.start + jnp.arange(here.q.shape[2], dtype=jnp.int32)
    causal = place[:, None] >= (j * block + jnp.arange(block, dtype=jnp.int32))[None]
    return jnp.where((same & causal[None])[:, None], s, -jnp.inf)


def _key_blocks(here: Blocks, keys: int, block: int) -> jax.Array:
    """How many key blocks a query block has to look at."""
    return jnp.minimum(-(-(here.start + here.q.shape[2]) // block), keys // block)


def _forward(q, k, v, segment_ids, places, scale, block):
    k_all, v_all, ids, key_block = _keys(k, v, segment_ids, block)
    dtype = wide_dtype(q.dtype)

    def over_queries(_, here: Blocks):
        def over_keys(j, running):
            top, total, o = running
            s = _scores(here, k_all, ids, j, key_block, scale)
            new = jnp.maximum(top, jnp.max(s, axis=-1))  # [B, H, C]
            shift = jnp.where(jnp.isneginf(new), 0.0, new)
            p = jnp.exp(s - shift[..., None])
            old = jnp.exp(top - shift)  # 0 where nothing was seen yet
            seen = jnp.einsum(
                "bhcd,bhdv->bhcv", p.astype(v.dtype), _part(v_all, j, key_block), preferred_element_type=dtype
            )
            return new, old * total + jnp.sum(p, axis=-1), old[..., None] * o + seen

        rows = here.q.shape[:3]
        start = (jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, v.shape[-1]), dtype))
        top, total, o = lax.fori_loop(0, _key_blocks(here, k_all.shape[2], key_block), over_keys, start)
        total = jnp.where(total == 0, 1.0, total)
        log_sum = jnp.where(jnp.isneginf(top), 0.0, top) + jnp.log(total)
        return None, (o / total[..., None], log_sum, jnp.max(top, axis=(0, 2)))

    blocks = _blocks(q, segment_ids, places, block)
    _, (o, log_sum, top) = lax.scan(over_queries, None, blocks)
    o, log_sum = (_uncut(x, places.shape[0], q.shape[2]) for x in (o, log_sum))
    max_logit = jnp.max(top, axis=0)
    max_logit = jnp.where(jnp.isneginf(max_logit), 0.0, max_logit)
    return (o, max_logit), (q, k, v, segment_ids, places, o, log_sum)


def _backward(scale, block, saved, cotangents):
    q, k, v, segment_ids, places, o, log_sum = saved
    do, _ = cotangents  # max_logit carries no gradient
    k_all, v_all, ids, key_block = _keys(k, v, segment_ids, block)
    dot = partial(jnp.einsum, preferred_element_type=o.dtype)
    delta = jnp.sum(do * o, axis=-1)  # [B, H, n L]
    cut = partial(_cut, stretches=places.shape[0], block=block)

    def over_queries(carry, xs):
        here, do, log_sum, delta = xs

        def over_keys(j, carry):
            dq, dk, dv = carry
            keys, values = _part(k_all, j, key_block), _part(v_all, j, key_block)
            p = jnp.exp(_scores(here, k_all, ids, j, key_block, scale) - log_sum[..., None])
            dp = dot("bhcv,bhdv->bhcd", do, values)
            ds = (scale * p * (dp - delta[..., None])).astype(q.dtype)
            dk = _add(dk, dot("bhcd,bhcq->bhdq", ds, here.q), j, key_block)
            dv = _add(dv, dot("bhcd,bhcv->bhdv", p.astype(v.dtype), do), j, key_block)
            return dq + dot("bhcd,bhdq->bhcq", ds, keys), dk, dv

        start = (jnp.zeros(here.q.shape, o.dtype), *carry)
        dq, *carry = lax.fori_loop(0, _key_blocks(here, k_all.shape[2], key_block), over_keys, start)
        return tuple(carry), dq

    xs = (_blocks(q, segment_ids, places, block), cut(do.astype(v.dtype)), cut(log_sum), cut(delta))
    (dk, dv), dq = lax.scan(over_queries, (jnp.zeros_like(wide(k_all)), jnp.zeros_like(wide(v_all))), xs)
    dq = _uncut(dq, places.shape[0], q.shape[2]).astype(q.dtype)
    return dq, dk[:, :, : k.shape[2]].astype(k.dtype), dv[:, :, : v.shape[2]].astype(v.dtype), None, None


def _add(total: jax.Array, x: jax.Array, j: jax.Array, block: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(total, _part(total, j, block) + x, j * block, axis=2)


_attention.defvjp(_forward, _backward)
