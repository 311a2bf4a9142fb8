"""Matmul of rows sorted by expert, each block of rows with its expert's matrix: the typed entry of the op."""

from typing import Literal

import jax

from k3train.kernels.grouped_matmul import blocked, reference


def grouped_matmul(
    rows: jax.Array,
    weights: jax.Array,
    block_expert: jax.Array,
    *,
    implementation: Literal["auto", "blocked", "reference"] = "auto",
) -> jax.Array:
    """``out[r] = rows[r] @ weights[expert of r's block]``.

    Sums are wide whatever the dtype of the operands; so are the sums of the weights' gradient over rows.

    Args:
      rows: [P, L]; P is a multiple of the number of blocks.
      weights: [E, L, M], of the dtype of ``rows``.
      block_expert: [blocks] int32, the expert of each block of P / blocks rows, never falling
        (:class:`k3train.kernels.grouped_matmul.permute.Plan`).
      implementation: ``auto`` is ``blocked``; ``reference`` multiplies all rows with every expert.

    Returns:
      [P, M] in the dtype of ``rows``.

    Raises:
      ValueError: where the rows are not whole blocks or the shapes do not fit.
    """
    if rows.shape[0] % block_expert.shape[0] or rows.shape[1] != weights.shape[1]:
        raise ValueError(f"{rows.shape} rows do not fit {block_expert.shape[0]} blocks and weights {weights.shape}")
    match implementation:
        case "reference":
            return reference.grouped_matmul(rows, weights, block_expert)
        case "auto" | "blocked":
            return blocked.grouped_matmul(rows, weights, block_expert)
