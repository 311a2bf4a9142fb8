"""Turns ``auto`` into a named implementation, once, before anything is traced. Imports no JAX."""

from typing import Any, NamedTuple

from k3train.config.errors import UserError
from k3train.kernels.config import (
    ATTENTION_KERNEL_WIDTHS,
    ATTENTION_KERNELS,
    KDA_KERNEL_CHUNK,
    KDA_KERNEL_WIDTH,
    KDA_KERNELS,
    KernelsConfig,
)

# Op -> implementation by backend.
CHOICES = {
    "kda": {"default": "chunked", "tpu": "mosaic_tpu", "gpu": "mosaic_gpu"},
    "attention": {"default": "blockwise"},
    "grouped_matmul": {"default": "blocked"},
    "cross_entropy": {"default": "chunked"},
}

KERNELS = {"kda": KDA_KERNELS, "attention": ATTENTION_KERNELS}
"""Op -> its kernels, and the devices each runs on."""

_HOPPER = ("H100", "H200", "H20", "H800", "GH200")


class Place(NamedTuple):
    """What the choice depends on."""

    backend: str
    """``cpu``, ``gpu`` or ``tpu``."""
    device_kind: str = ""
    """The device's name, as its driver gives it."""
    kda_width: int | None = None
    """Width of the KDA heads; None where a model has none."""
    compute_dtype: str = "bfloat16"
    context: int = 1
    """Devices that share out a row's tokens."""
    mla_widths: tuple[int, int, int] | None = None
    """Channels of MLA's keys of a head's own and shared, and of its values; None where a model has none."""


def resolve(kernels: KernelsConfig, place: Place) -> tuple[KernelsConfig, list[tuple[str, str, str]]]:
    """Explicit implementations for a place.

    Returns:
      The section without ``auto``, and rows (op, implementation, why) to print.

    Raises:
      UserError: where a kernel is asked for that these devices do not run.
    """
    chosen: dict[str, Any] = {}
    rows = []
    for op, by_backend in CHOICES.items():
        asked = getattr(kernels, op)
        named = by_backend.get(place.backend, by_backend["default"]) if asked == "auto" else asked
        why = f"auto on {place.backend}" if asked == "auto" else f"kernels.{op}"
        if named in KERNELS.get(op, {}):
            unfit = _other_devices(op, named, place)
            if unfit and asked != "auto":
                raise UserError(
                    f"kernels.{op}: {named} {unfit}; set kernels.{op}: auto, which takes what these devices run"
                )
            if unfit := unfit or _unfit(op, named, place):
                why += f": {named} {unfit}"
                named = by_backend["default"]
            elif op == "kda":
                chosen["kda_chunk"] = KDA_KERNEL_CHUNK
        chosen[op] = named
        rows.append((op, named, why))
    return kernels.model_copy(update=chosen), rows


def _other_devices(op: str, named: str, place: Place) -> str | None:
    """Why a kernel does not run on these devices, or None."""
    runs_on, has = KERNELS[op][named], place.backend
    if runs_on == has == "gpu" and not any(name in place.device_kind.split() for name in _HOPPER):
        runs_on, has = "Hopper gpu", place.device_kind or "unnamed"
    return None if runs_on == has else f"runs on {runs_on} devices, and this run has {has} ones"


def _unfit(op: str, named: str, place: Place) -> str | None:
    """Why a kernel does not serve the run, or None."""
    if op == "attention":
        if place.mla_widths not in (None, ATTENTION_KERNEL_WIDTHS):
            keys = ("qk_nope_head_dim", "qk_shared_head_dim", "v_head_dim")
            has = ", ".join(f"model.mla.{key} {width}" for key, width in zip(keys, place.mla_widths, strict=True))
            return f"serves heads of {', '.join(map(str, ATTENTION_KERNEL_WIDTHS))} channels, and here are {has}"
    elif place.kda_width not in (None, KDA_KERNEL_WIDTH):
        return f"serves heads of width {KDA_KERNEL_WIDTH}, and model.kda.head_dim is {place.kda_width}"
    if named != "mosaic_gpu":
        return None
    if place.compute_dtype != "bfloat16":
        return f"takes bfloat16, and train.compute_dtype is {place.compute_dtype}"
    if place.context > 1:
        return f"does not share out a row, and mesh.context is {place.context}"
    return None
