"""Compiles the delta rule's Mosaic GPU kernels, forward and backward, for an H200 that need not be there.

    JAX_PLATFORMS=cpu MOSAIC_GPU_DUMP_PTX=1 MOSAIC_GPU_DUMP_TO=FOLDER python tests/mosaic_gpu_compile.py bounded 96 130

Arguments: the gate (bounded, softplus, given), heads and tokens. 96 heads fill the card; 2 do not, so value channels
split, and rows of 2,048 tokens are cut into segments.
Prints the bytes the program needs besides arguments and results.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kda_cases import ids, inputs, kernels

from k3train.parallel.targets import devices


def main(gate: str, heads: int, tokens: int) -> None:
    place = NamedSharding(Mesh(np.asarray(devices("h200", 1)[:1]), ("x",)), PartitionSpec())
    aval = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    arguments, segment_ids = jax.tree.map(aval, (inputs(tokens, heads, gate=gate), ids((tokens,))))

    def loss(arguments, segment_ids):
        o, state = kernels(arguments, segment_ids, gate)
        return jnp.sum(jnp.square(o.astype(jnp.float32))) + jnp.sum(jnp.square(state))

    compiled = jax.jit(jax.grad(loss)).trace(arguments, segment_ids).lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    print(memory.temp_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
