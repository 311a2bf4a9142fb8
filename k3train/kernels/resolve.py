"""Turns ``auto`` into a named implementation, once, before anything is traced. Imports no JAX."""

from k3train.kernels.config import KernelsConfig

# Op -> implementation by backend; today one form serves every backend, and a backend may later name its own.
CHOICES = {
    "kda": {"default": "chunked"},
    "attention": {"default": "blockwise"},
    "grouped_matmul": {"default": "blocked"},
    "cross_entropy": {"default": "chunked"},
}


def resolve(kernels: KernelsConfig, backend: str) -> tuple[KernelsConfig, list[tuple[str, str, str]]]:
    """Explicit implementations for ``backend`` (``cpu``, ``gpu``, ``tpu``).

    Returns:
      The section without ``auto``, and rows (op, implementation, why) to print.
    """
    chosen, rows = {}, []
    for op, by_backend in CHOICES.items():
        asked = getattr(kernels, op)
        chosen[op] = by_backend.get(backend, by_backend["default"]) if asked == "auto" else asked
        rows.append((op, chosen[op], f"auto on {backend}" if asked == "auto" else f"kernels.{op}"))
    return kernels.model_copy(update=chosen), rows
