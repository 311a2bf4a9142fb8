"""The routed experts: dispatch, three grouped matmuls, weighted sum (k3-facts 5.1), on each device's own tokens.

Under a mesh every device sorts and multiplies its own share of the tokens, with all experts' matrices
gathered: left to the partitioner, one sort of all tokens would bring every token to every device.
"""

from functools import partial

import jax
from jax.sharding import PartitionSpec

from k3train.kernels.config import KernelsConfig
from k3train.kernels.grouped_matmul.api import grouped_matmul
from k3train.kernels.grouped_matmul.permute import block_rows, combine, dispatch, plan
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import glu
from k3train.parallel.activations import BATCH_AXES

Matrices = tuple[jax.Array, jax.Array, jax.Array]


def routed_experts(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    activation: ActivationConfig,
    kernels: KernelsConfig,
) -> jax.Array:
    """``y_n = sum_j weights_nj w2_e(glu(w1_e z_n, w3_e z_n))`` with e = ids_nj; no token is dropped.

    Args:
      z: [N, L] expert inputs.
      ids: [N, k] int32 chosen experts.
      weights: [N, k] wide.
      matrices: w1 (gate) [E, L, M], w3 (up) [E, L, M] and w2 (down) [E, M, L].
      activation: of the gated product.
      kernels: implementation and greatest block of the grouped matmul.

    Returns:
      [N, L] wide, the sum over experts held wide.
    """
    compute = partial(_on_one_device, activation=activation, kernels=kernels)
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    ways = 1
    for axis in axes:
        ways *= mesh.shape[axis]
    if ways > 1 and z.shape[0] % ways == 0:
        own, whole = PartitionSpec(axes), PartitionSpec()
        # The op's hand-written gradients do not state what varies over the mesh, hence no check of it.
        compute = jax.shard_map(compute, in_specs=(own, own, own, whole), out_specs=own, check_vma=False)
    return compute(z, ids, weights, matrices)


def _on_one_device(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    *,
    activation: ActivationConfig,
    kernels: KernelsConfig,
) -> jax.Array:
    w1, w3, w2 = (w.astype(z.dtype) for w in matrices)
    experts = w1.shape[0]
    block = block_rows(ids.shape[0], ids.shape[1], experts, kernels.grouped_matmul_block)
    where = plan(ids, experts, block)

    def multiply(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        return grouped_matmul(rows, matrix, where.block_expert, implementation=kernels.grouped_matmul)

    rows = dispatch(z, where)  # [P, L]
    inner = glu(multiply(rows, w1), multiply(rows, w3), activation)  # [P, M]
    return combine(multiply(inner, w2), weights, where)
