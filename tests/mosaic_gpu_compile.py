"""Compiles the Mosaic GPU kernels of an op, forward and backward, for an H200 that need not be there.

    JAX_PLATFORMS=cpu MOSAIC_GPU_DUMP_PTX=1 MOSAIC_GPU_DUMP_TO=FOLDER python tests/mosaic_gpu_compile.py bounded 96 130

Arguments: ``attention`` or the gate of the delta rule (bounded, softplus, given), heads and tokens. For the delta rule,
96 heads fill the card; 2 do not, so value channels split, and rows of 2,048 tokens are cut into segments.
Prints the bytes the program needs besides arguments and results.
"""

import sys

import attention_cases
import jax
import jax.numpy as jnp
import kda_cases
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.parallel.targets import devices


def main(what: str, heads: int, tokens: int) -> None:
    place = NamedSharding(Mesh(np.asarray(devices("h200", 1)[:1]), ("x",)), PartitionSpec())
    aval = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
    attends = what == "attention"
    drawn = attention_cases.inputs(tokens, heads) if attends else kda_cases.inputs(tokens, heads, gate=what)
    arguments, segment_ids = jax.tree.map(aval, (drawn, kda_cases.ids((tokens,))))

    def loss(arguments, segment_ids):
        if attends:
            return jnp.sum(jnp.square(attention_cases.kernels(arguments, segment_ids)[0]))
        o, state = kda_cases.kernels(arguments, segment_ids, what)
        return jnp.sum(jnp.square(o.astype(jnp.float32))) + jnp.sum(jnp.square(state))

    compiled = jax.jit(jax.grad(loss)).trace(arguments, segment_ids).lower().compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    print(memory.temp_size_in_bytes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
