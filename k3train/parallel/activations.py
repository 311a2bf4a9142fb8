"""How activations lie on the mesh, and code that each device runs on its own part.

Rows of a batch go over ``replica``, ``fsdp`` and ``expert``; tokens of a row over ``context``, and over ``tensor``
where the heads do not lie there. What XLA partitions by itself is told with :func:`hidden`, :func:`enter`,
:func:`leave` and :func:`heads`; what it cannot runs in :func:`on_each_device`.

Shapes: B rows, T tokens, D hidden, H heads.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from k3train.parallel.config import ROW_AXES, TOKEN_AXES

Axis = str | tuple[str, ...] | None
ROWS: Axis = ROW_AXES
TOKENS: Axis = TOKEN_AXES
ALL_AXES = (*ROW_AXES, *TOKEN_AXES)


def axis_size(*axes: str) -> int:
    """How many devices the current mesh has along ``axes``; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in axes if mesh is not None and name in mesh.axis_names)


def split(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> PartitionSpec:
    """``axes`` of the current mesh for the dimensions of ``shape``; a dimension that does not divide stays whole."""
    entries: list[Axis] = []
    for size, axis in zip(shape, axes, strict=False):
        used = tuple(name for name in names(axis) if axis_size(name) > 1)
        entries.append(used if used and size % axis_size(*used) == 0 else None)
    return PartitionSpec(*entries)


def names(axis: Axis) -> tuple[str, ...]:
    """The mesh axes of one dimension."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def constrain(x: jax.Array, *axes: Axis) -> jax.Array:
    """Keeps the dimensions of ``x`` on ``axes`` of the current mesh (no mesh: nothing to do)."""
    spec = split(x.shape, axes)
    if all(entry is None for entry in spec):
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def hidden(x: jax.Array) -> jax.Array:
    """[B, T, ...] between the sub-layers: rows and tokens over all devices."""
    return constrain(x, ROWS, TOKENS)


def projected(x: jax.Array) -> jax.Array:
    """[B, T, ...] as a projection reads and writes it: the tokens of a context shard together."""
    return constrain(x, ROWS, "context")


def heads(x: jax.Array) -> jax.Array:
    """[B, T, H...] as a projection writes it: the last axis, or the heads, over ``tensor``."""
    return constrain(x, ROWS, "context", "tensor")


@jax.custom_vjp
def enter(x: jax.Array) -> jax.Array:
    """[B, T, D] from between the sub-layers to the projections; its gradient comes back the other way."""
    return projected(x)


@jax.custom_vjp
def leave(x: jax.Array) -> jax.Array:
    """[B, T, D] from the projections to between the sub-layers; its gradient goes the other way."""
    return hidden(x)


enter.defvjp(lambda x: (projected(x), None), lambda _, gradient: (hidden(gradient),))
leave.defvjp(lambda x: (hidden(x), None), lambda _, gradient: (projected(gradient),))


def on_each_device(function: Callable[..., Any], arrays: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: Any):
    """Runs ``function`` on every device with its own part of ``arrays``; without a mesh, on all of them.

    Args:
      function: of local arrays; with a mesh it may use the axes' names.
      arrays: global; trees and None are allowed.
      in_specs: for each of them, a ``PartitionSpec`` made of :func:`split`'s entries.
      out_specs: the same of the results.

    Returns:
      What ``function`` returns, global.
    """
    if axis_size(*ALL_AXES) == 1:
        return function(*arrays)
    # Hand-written gradients inside do not state what varies over the mesh, hence no check of it.
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*arrays)
