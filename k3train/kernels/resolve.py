"""Turns ``auto`` into a named implementation, once, before anything is traced. Imports no JAX."""

from typing import Any

from k3train.config.errors import UserError
from k3train.kernels.config import KDA_KERNEL_CHUNK, KDA_KERNEL_WIDTH, KDA_KERNELS, KernelsConfig

# Op -> implementation by backend.
CHOICES = {
    "kda": {"default": "chunked", "tpu": "mosaic_tpu"},
    "attention": {"default": "blockwise"},
    "grouped_matmul": {"default": "blocked"},
    "cross_entropy": {"default": "chunked"},
}


def resolve(
    kernels: KernelsConfig, backend: str, kda_width: int | None = None
) -> tuple[KernelsConfig, list[tuple[str, str, str]]]:
    """Explicit implementations for ``backend`` (``cpu``, ``gpu``, ``tpu``).

    Args:
      kernels: the section.
      backend: what kind of devices the run has.
      kda_width: width of the KDA heads; None where a model has none.

    Returns:
      The section without ``auto``, and rows (op, implementation, why) to print.

    Raises:
      UserError: where a kernel is asked for that these devices do not run.
    """
    chosen: dict[str, Any] = {}
    rows = []
    for op, by_backend in CHOICES.items():
        asked = getattr(kernels, op)
        named = by_backend.get(backend, by_backend["default"]) if asked == "auto" else asked
        why = f"auto on {backend}" if asked == "auto" else f"kernels.{op}"
        if op == "kda" and named in KDA_KERNELS:
            runs_on = KDA_KERNELS[named]
            if runs_on != backend:
                raise UserError(
                    f"kernels.kda: {named} runs on {runs_on} devices, and this run has {backend} ones; "
                    "set kernels.kda: auto, which takes what these devices run"
                )
            if kda_width not in (None, KDA_KERNEL_WIDTH):
                why += f": {named} serves heads of width {KDA_KERNEL_WIDTH}, and model.kda.head_dim is {kda_width}"
                named = by_backend["default"]
            else:
                chosen["kda_chunk"] = KDA_KERNEL_CHUNK
        chosen[op] = named
        rows.append((op, named, why))
    return kernels.model_copy(update=chosen), rows
