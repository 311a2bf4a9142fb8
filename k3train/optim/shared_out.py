"""Newton-Schulz over a mesh: whole matrices are shared out over the devices, and each is orthogonalised once.

An array [..., n, H d] is stored in parts. An all-to-all trades parts of every matrix for some whole matrices; devices
that would hold copies take different ones. Then each device works alone, and everything goes back the way it came.
A device sends and receives about twice the bytes it stores, whatever the number of devices.

Shapes: b matrices of a device, n and m their sides, H heads of width d.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from k3train.optim.heads import join_heads, split_heads
from k3train.parallel.activations import ALL_AXES, axis_size, names

Names = tuple[str, ...]
Function = Callable[[jax.Array], jax.Array]


class Split(NamedTuple):
    """Mesh axes over which the matrices [n, H d] of an array are cut."""

    rows: Names
    """Their first side."""
    columns: Names
    """Their second side, elsewhere than between heads."""
    heads: Names
    """Their second side, between heads."""
    copies: Names
    """Axes along which devices hold copies."""


def split_of(spec: PartitionSpec, ndim: int, heads: int) -> Split:
    """How an array of ``ndim`` axes and so many heads, stored as ``spec``, is cut."""
    entries = [names(entry) for entry in spec] + [()] * (ndim - len(spec))
    used = {name for entry in entries for name in entry}
    copies = tuple(name for name in ALL_AXES if axis_size(name) > 1 and name not in used)
    rows, last = entries[-2:]
    between = heads > 1 and heads % axis_size(*last) == 0
    return Split(rows, () if between else last, last if between else (), copies)


def on_whole_matrices(
    function: Function, arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], heads: Sequence[int]
) -> list[jax.Array]:
    """``function`` once on the blocks of arrays whose blocks have the same two sides, in either order.

    Args:
      function: of wide matrices [b, n, m], n <= m; it must leave matrices of zeros finite.
      arrays: [..., n, H d], global.
      specs: how each is stored on the current mesh, where its result stays.
      heads: H of each.

    Returns:
      Arrays of the same shapes.
    """
    splits = [split_of(spec, x.ndim, h) for spec, x, h in zip(specs, arrays, heads, strict=True)]

    def own(*local: jax.Array) -> list[jax.Array]:
        mine, back = [], []
        for x, h, split in zip(local, heads, splits, strict=True):
            whole, undo = _whole_blocks(x, h, split)
            mine.append(_wide_side(whole))
            back.append((whole.shape, undo))
        done = function(jnp.concatenate(mine) if len(mine) > 1 else mine[0])
        ends = [sum(len(x) for x in mine[: i + 1]) for i in range(len(mine) - 1)]
        pieces = jnp.split(done, ends)
        return [
            undo(piece if piece.shape == shape else jnp.swapaxes(piece, -1, -2))
            for piece, (shape, undo) in zip(pieces, back, strict=True)
        ]

    if axis_size(*ALL_AXES) == 1:
        return own(*arrays)
    return list(jax.shard_map(own, in_specs=tuple(specs), out_specs=list(specs), check_vma=False)(*arrays))


def _whole_blocks(x: jax.Array, heads: int, split: Split) -> tuple[jax.Array, Function]:
    """A device's share [b, n, d] of the whole blocks of an array of which it has ``x``, and the way back."""
    if split.columns:  # heads are cut out of whole matrices
        here, later = 1, heads
    else:
        here, later = heads // axis_size(*split.heads), 1
    blocks = split_heads(x, here)
    whole, back = _traded(blocks.reshape(-1, *blocks.shape[-2:]), split)
    apart = split_heads(whole, later)

    def undo(done: jax.Array) -> jax.Array:
        return join_heads(back(join_heads(done.reshape(apart.shape), later)).reshape(blocks.shape), here)

    return apart.reshape(-1, *apart.shape[-2:]), undo


def _traded(x: jax.Array, split: Split) -> tuple[jax.Array, Function]:
    """Parts ``x`` [b, n', m'] of all of a device's matrices for whole ones, and the way back."""
    sides = [(axes, side) for axes, side in ((split.rows, 1), (split.columns, 2)) if axes]
    counts = []
    for axes, side in sides:
        counts.append(len(x))
        x = lax.all_to_all(_filled(x, axis_size(*axes)), axes, 0, side, tiled=True)
    count = len(x)
    if split.copies:
        x = _filled(x, axis_size(*split.copies))
        share = len(x) // axis_size(*split.copies)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(split.copies) * share, share)

    def back(done: jax.Array) -> jax.Array:
        if split.copies:
            done = lax.all_gather(done, split.copies, tiled=True)[:count]
        for (axes, side), kept in zip(reversed(sides), reversed(counts), strict=True):
            done = lax.all_to_all(done, axes, side, 0, tiled=True)[:kept]
        return done

    return x, back


def _wide_side(x: jax.Array) -> jax.Array:
    """``x`` [b, n, m] with the shorter side first."""
    return jnp.swapaxes(x, -1, -2) if x.shape[-2] > x.shape[-1] else x


def _filled(x: jax.Array, ways: int) -> jax.Array:
    """[b, ...] with zeros added until ``ways`` divides b."""
    return jnp.pad(x, ((0, -x.shape[0] % ways),) + ((0, 0),) * (x.ndim - 1))
