"""What the Mosaic GPU kernels of attention share: sizes, memory, and the order in which blocks are visited.

Letters in shape comments: B rows, T tokens (whole blocks), H heads, N 128 key channels of a head's own, R 64 that all
heads share, V 128 value channels.
"""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from k3train.kernels.attention.mosaic_gpu.bounds import BLOCK

OWN, SHARED, VALUE = 128, 64, 128
"""Channels of a key of a head's own and shared, and of a value."""
ROWS = 64
"""Rows of a block that one warpgroup works on: what a tensor core instruction takes."""
GROUPS = BLOCK // ROWS
"""Warpgroups that compute; one more issues copies."""
LOG2E = math.log2(math.e)
MASKED = -1e30
"""Greatest score to base 2 of a row that saw no key yet: finite, so that 2^(-inf - MASKED) is 0 and not NaN."""
L2_BYTES = 24 * 2**20
"""Keys and values of the heads that are worked on at a time should fit into so much of the second-level cache."""

WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
"""One value a row of a tile."""
COLUMN = WGMMA.reduce(0)
"""One value a column."""
_SWIZZLED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


class Operands(NamedTuple):
    """Queries, keys and values in the form the kernels load; tokens in whole blocks."""

    q: jax.Array
    """[B, T, H, N + R] bfloat16."""
    k: jax.Array
    """[B, T, H, N] bfloat16, a head's own part."""
    shared: jax.Array
    """[B, T, R] bfloat16, the part of all heads."""
    v: jax.Array
    """[B, T, H, V] bfloat16."""
    query_ids: jax.Array
    """[B, T] int32 documents, -1 for padding, which so equals no key's."""
    key_ids: jax.Array
    """[B, T] int32 documents, 0 for padding."""


def heads_together(heads: int, tokens: int) -> int:
    """Heads whose longest blocks start side by side: as many as leave their keys and values in the cache."""
    most = max(1, L2_BYTES // (tokens * 2 * (OWN + VALUE)))
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= most)


def smem(*shape: int):
    """bfloat16 in shared memory that the tensor cores can read; the last axis is a multiple of 64."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_SWIZZLED)


def turned(ref):
    """The two axes of a ref exchanged."""
    return ref.transpose((1, 0))


def zeros(*shape: int) -> jax.Array:
    """A float32 tile of zeros."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), WGMMA)


def rows(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One value a row, to a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One value a column, to a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def iota(shape: tuple[int, int], dim: int) -> jax.Array:
    """Row or column numbers of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=WGMMA)


def place(heads: int, together: int) -> SimpleNamespace:
    """Which row, head and tile a thread block is; its grid is (heads, tile, head)."""
    outer, groups = lax.axis_index("heads"), jnp.int32(heads // together)
    head = lax.rem(outer, groups) * together + lax.axis_index("head")
    return SimpleNamespace(row=lax.div(outer, groups), head=head, tile=lax.axis_index("tile"))


def run(products, *start: jax.Array) -> Any:
    """What ``products``, given accumulators that hold ``start``, make of them; returns when all are done."""
    state: Any = pl.run_state(products)
    return state(tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in start))
