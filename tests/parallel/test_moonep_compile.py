"""MoonEP with the real ``ragged_all_to_all``, forward and backward, compiled for H200 and TPU v5p without either."""

import json

import pytest
from absent import compiled, need

# Nothing is run: it says whether the programs compile, and with which collectives.
WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from k3train.parallel.moonep.config import Options
from k3train.parallel.moonep.routed import routed
from k3train.parallel.targets import devices

kind, ranks, transport = sys.argv[1], int(sys.argv[2]), sys.argv[3]
mesh = Mesh(np.asarray(devices(kind, ranks)), ("expert",))
tokens, top_k, experts, width, inner = 1024, 8, 8 * ranks, 256, 128
sharded = NamedSharding(mesh, P("expert"))
def shape(*size, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(size, dtype, sharding=sharded)
z = shape(ranks * tokens, width, dtype=jnp.bfloat16)
ids, weights = shape(ranks * tokens, top_k, dtype=jnp.int32), shape(ranks * tokens, top_k)
matrices = shape(experts, width, inner), shape(experts, width, inner), shape(experts, inner, width)
layer = jax.shard_map(
    lambda *a: routed(*a, axis="expert", activation=lambda g, u: jax.nn.silu(g) * u, options=Options(transport, 2))[0],
    mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
def step(z, ids, weights, matrices):
    return jax.value_and_grad(lambda z, w, m: jnp.sum(jnp.square(layer(z, ids, w, m))), (0, 1, 2))(z, weights, matrices)
compiled = jax.jit(step).trace(z, ids, weights, matrices).lower().compile()
text = compiled.as_text()
print(json.dumps({"ragged": text.count("ragged-all-to-all("), "starts": text.count("ragged-all-to-all-start"),
                  "temporary": compiled.memory_analysis().temp_size_in_bytes}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("h200", 2), ("h200", 8), ("v5p", 8)])
def test_ragged_compiles(kind, ranks):
    need("gpu" if kind == "h200" else "tpu")
    found = json.loads(compiled("-c", WORKER, kind, str(ranks), "ragged"))
    assert found["ragged"] + found["starts"] > 0, "the emulation was compiled, not the op"
