"""Weights as a layer computes with them: gathered from where they are stored, their gradients scattered back.

Left to itself the partitioner may multiply parts of a weight and exchange activations, or copy everything to every
device. Here the way is said: one all-gather before the layer, one reduce-scatter after its gradient (ZeRO-3). What
stays split are heads and widths over ``tensor``. Experts are gathered by the layer that computes them.
"""

from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from k3train.parallel.activations import ALL_AXES, axis_size
from k3train.parallel.axes import MODEL_AXES, stored
from k3train.parallel.trees import Tree, paired, rebuild

GATHERED = "gathered"
"""Name of gathered weights for rematerialisation: they are never kept for the backward pass."""


def gather_weights(params: Tree, specs: Tree) -> dict[Any, Any]:
    """The arrays of ``params`` as a layer of the current mesh computes with them.

    Args:
      params: nested dict of one layer's arrays.
      specs: the same of ``ParamSpec``.
    """
    if axis_size(*ALL_AXES) == 1:
        return dict(params)
    flat = {}
    for path, (array, spec) in paired(params, specs).items():
        lies, used = stored(array.shape, spec.axes), working(array.shape, spec.axes)
        if lies == used or "experts" in spec.axes:
            flat[path] = array
        else:
            flat[path] = checkpoint_name(_gathered(array, lies, used), GATHERED)
    return rebuild(params, flat)


def working(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """How an array lies on the current mesh while its layer computes."""
    entries = [MODEL_AXES.get(axis or "") if len(axes) > 1 else None for axis in axes]
    entries = [
        name if name and axis_size(name) > 1 and size % axis_size(name) == 0 else None
        for name, size in zip(entries, shape[len(shape) - len(axes) :], strict=True)
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*(None,) * (len(shape) - len(axes)) * bool(entries), *entries)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(array: jax.Array, lies: PartitionSpec, used: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(array, used)


def _forward(array: jax.Array, lies: PartitionSpec, used: PartitionSpec) -> tuple[jax.Array, None]:
    return _gathered(array, lies, used), None


def _backward(lies: PartitionSpec, used: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.with_sharding_constraint(gradient, lies),)


_gathered.defvjp(_forward, _backward)
