"""Which blocks of keys a block of queries has to look at, and the other way round, where rows hold several documents.

Right for any numbering of documents; where numbers ascend along the row, as packing gives them, no block is looked at
in vain but for those at a document's ends.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128
"""Tokens of a block."""


class Bounds(NamedTuple):
    """Block numbers, each [B, N] int32 over the N blocks of a row.

    A block and another are ``alike`` where all tokens of both are of one document: their scores need no mask.
    """

    first: jax.Array
    """Queries of block i see no key before this block; at most i."""
    alike_from: jax.Array
    """Key blocks from here to i - 1 are like query block i; from ``first`` to i."""
    alike_until: jax.Array
    """Query blocks from j + 1 up to this one, exclusive, are like key block j; from j + 1 to ``last``."""
    last: jax.Array
    """Keys of block j are seen by no query from this block on; at least j + 1."""


def bounds(segment_ids: jax.Array) -> Bounds:
    """The bounds of each block of a row.

    Args:
      segment_ids: [B, T] int32, 0 for padding; T a multiple of ``BLOCK``.
    """
    batch, tokens = segment_ids.shape
    count = tokens // BLOCK
    ids = segment_ids.reshape(batch, count, BLOCK)
    place = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], (batch, count))
    greatest = jnp.max(ids, axis=-1)
    least = jnp.min(jnp.where(ids == 0, jnp.iinfo(ids.dtype).max, ids), axis=-1)
    # Blocks up to j hold nothing greater than so_far[j], blocks from i on nothing less than to_come[i].
    so_far, to_come = lax.cummax(greatest, axis=1), lax.cummin(least, axis=1, reverse=True)
    first = jax.vmap(jnp.searchsorted)(so_far, least).astype(jnp.int32)
    last = jax.vmap(lambda a, v: jnp.searchsorted(a, v, side="right"))(to_come, greatest).astype(jnp.int32)
    first, last = jnp.minimum(first, place), jnp.maximum(last, place + 1)
    one = (greatest == least) & (jnp.min(ids, axis=-1) == greatest)
    follows = one[:, 1:] & one[:, :-1] & (greatest[:, 1:] == greatest[:, :-1])  # block i + 1 is like block i
    follows = jnp.pad(follows, ((0, 0), (1, 0)))
    alike_from = lax.cummax(jnp.where(follows, 0, place), axis=1)
    breaks = lax.cummin(jnp.where(follows, count, place), axis=1, reverse=True)
    alike_until = jnp.pad(breaks[:, 1:], ((0, 0), (0, 1)), constant_values=count)
    return Bounds(first, alike_from, alike_until, last)
