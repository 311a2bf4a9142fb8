"""The routed experts of one device's tokens: dispatch, three grouped matmuls, weighted sum (k3-facts 5.1)."""

import jax

from k3train.kernels.config import KernelsConfig
from k3train.kernels.grouped_matmul.api import grouped_matmul
from k3train.kernels.grouped_matmul.permute import block_rows, combine, dispatch, plan
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import glu

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
    w1, w3, w2 = (w.astype(z.dtype) for w in matrices)
    experts = w1.shape[0]
    block = block_rows(ids.shape[0], ids.shape[1], experts, kernels.grouped_matmul_block)
    where = plan(ids, experts, block)

    def multiply(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        return grouped_matmul(rows, matrix, where.block_expert, implementation=kernels.grouped_matmul)

    rows = dispatch(z, where)  # [P, L]
    inner = glu(multiply(rows, w1), multiply(rows, w3), activation)  # [P, M]
    return combine(multiply(inner, w2), weights, where)
