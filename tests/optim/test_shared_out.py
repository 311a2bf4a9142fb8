"""Matrices that lie in parts over a mesh come back as one device makes them, each worked on once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from k3train.kernels.newton_schulz.api import orthogonalize
from k3train.optim.shared_out import on_whole_matrices
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh

# (shape, heads, how it is stored) of arrays with blocks of 8 x 12, in either order.
ARRAYS = {
    "rows cut": ((3, 8, 12), 1, P(None, "fsdp")),
    "columns cut": ((5, 8, 12), 1, P(None, None, "fsdp")),
    "both cut": ((8, 12), 1, P("fsdp", "context")),
    "cut twice": ((3, 8, 12), 1, P(None, ("fsdp", "context"))),
    "tall": ((2, 12, 8), 1, P(None, "fsdp")),
    "stack cut": ((4, 8, 12), 1, P("fsdp", "context")),
    "whole": ((3, 8, 12), 1, P()),
    "between heads": ((3, 8, 4 * 12), 4, P(None, "fsdp", "context")),
    "through heads": ((3, 8, 3 * 12), 3, P(None, None, ("fsdp", "context"))),
    "heads, rows cut": ((12, 2 * 8), 2, P("fsdp")),
}


@pytest.mark.parametrize("sizes", [{"fsdp": 2, "context": 2}, {"fsdp": 4}, {"replica": 2, "fsdp": 2}], ids=str)
def test_a_mesh_equals_one_device(sizes):
    mesh = build_mesh(MeshConfig(**{"replica": 1} | sizes))
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape, *_ in ARRAYS.values()]
    heads = [count for _, count, _ in ARRAYS.values()]
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(np.count_nonzero(np.abs(x).max((1, 2)))), x)
        return orthogonalize(x, dtype=jnp.float32)

    def on(specs):
        return jax.jit(lambda *arrays: on_whole_matrices(function, arrays, specs, heads))

    want = on([P()] * len(arrays))(*arrays)
    blocks = sum(int(np.prod(x.shape)) for x in arrays) // 96
    assert seen == [blocks]
    seen.clear()
    specs = [spec for *_, spec in ARRAYS.values()]
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
        got = jax.block_until_ready(on(specs)(*placed))
    jax.effects_barrier()
    for name, a, b in zip(ARRAYS, got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6, err_msg=name)
    assert len(seen) == 4 and sum(seen) == blocks  # no block twice, none left out
    assert max(seen) <= blocks / 4 + 2 * len(ARRAYS)
