"""Matmul of rows sorted by expert, each block of rows with its expert's matrix: the typed entry of the op."""

from typing import Literal

import jax

from k3train.kernels.grouped_matmul import blocked, reference
from k3train.kernels.numerics import wide


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


def gradients(
    rows: jax.Array,
    weights: jax.Array,
    block_expert: jax.Array,
    dy: jax.Array,
    *,
    implementation: Literal["auto", "blocked", "reference"] = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of :func:`grouped_matmul`, that of the weights as it was summed: wide.

    Args:
      rows, weights, block_expert: as there.
      dy: [P, M], of the result.

    Returns:
      (of the rows [P, L] in their dtype, of the weights [E, L, M] wide).
    """
    match implementation:
        case "reference":
            wide_weights = wide(weights)
            _, pull = jax.vjp(lambda x, w: reference.grouped_matmul(x, w, block_expert), wide(rows), wide_weights)
            d_rows, d_weights = pull(wide(dy))
            return d_rows.astype(rows.dtype), d_weights
        case "auto" | "blocked":
            return blocked.gradients(rows, weights, block_expert, dy)
