"""How activations lie on the mesh: rows over the batch axes, everything else whole."""

import math

import jax
from jax.sharding import PartitionSpec

BATCH_AXES = ("data", "fsdp")


def batch_ways() -> int:
    """Over how many devices the current mesh spreads the rows of a batch; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in BATCH_AXES if mesh is not None and name in mesh.axis_names)


def shard_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """Keeps dimension ``axis`` of ``x`` spread over the batch axes of the current mesh (no mesh: nothing to do)."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in BATCH_AXES if mesh is not None and name in mesh.axis_names)
    ways = batch_ways()
    if ways == 1 or x.shape[axis] % ways:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(None,) * axis, axes))
