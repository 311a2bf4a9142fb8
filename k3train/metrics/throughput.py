"""Speed and memory: tokens/s, MFU against a table of peaks, device and host memory. Imports no JAX."""

import re
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

_GIB = 2**30


class Peak(NamedTuple):
    """Dense matrix-unit peak of one device, in TFLOP/s (no sparsity)."""

    kind: str
    """Regular expression that the whole of ``jax.Device.device_kind`` must match, case ignored."""
    dtype: str
    tflops: float
    source: str


PEAKS = (
    Peak(r"NVIDIA (H200|GH200)( \d+GB)?( HBM3e?)?", "bfloat16", 989.0, "H200 / GH200 datasheet: 1,979 with sparsity"),
    Peak(r"NVIDIA H100( 80GB HBM3| SXM5.*)?", "bfloat16", 989.0, "H100 datasheet, SXM: 1,979 with sparsity"),
    Peak(r"NVIDIA H100 PCIe", "bfloat16", 756.0, "H100 datasheet, PCIe: 1,513 with sparsity"),
    Peak(r"NVIDIA A100[- ](SXM4-|PCIE-)?\d+GB( PCIe)?", "bfloat16", 312.0, "A100 datasheet: 312 dense"),
    Peak(r"NVIDIA B200", "bfloat16", 2250.0, "DGX B200 datasheet: 36 PFLOP/s with sparsity for eight"),
    Peak(r"TPU v4", "bfloat16", 275.0, "Google Cloud, TPU v4 system architecture"),
    Peak(r"TPU (v5 ?lite|v5e)", "bfloat16", 197.0, "Google Cloud, TPU v5e system architecture"),
    Peak(r"TPU (v5|v5p)", "bfloat16", 459.0, "Google Cloud, TPU v5p system architecture"),
    Peak(r"TPU (v6 ?lite|v6e)", "bfloat16", 918.0, "Google Cloud, TPU v6e system architecture"),
)


def peak_flops(device_kind: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of one device for products in ``dtype``; None where the table does not know (CPU, MIG slices)."""
    for peak in PEAKS:
        if peak.dtype == dtype and re.fullmatch(peak.kind, device_kind.strip(), re.IGNORECASE):
            return peak.tflops * 1e12
    return None


def speed(
    tokens: float, seconds: float, devices: int, flops_per_token: float | None, peak: float | None
) -> dict[str, float | None]:
    """``perf/tokens_per_s``, ``perf/tokens_per_s_device`` and ``perf/mfu``.

    Args:
      tokens: nominal tokens of the interval, all devices.
      seconds: its wall time.
      devices: devices of all processes.
      flops_per_token: model FLOPs of forward and backward (active experts only, causal attention halved).
      peak: FLOP/s of one device, from :func:`peak_flops`.

    Returns:
      MFU = flops_per_token x tokens/s / (peak x devices); None where a factor is unknown.
    """
    rate = tokens / seconds if seconds > 0 else 0.0
    mfu = None
    if flops_per_token is not None and peak is not None:
        mfu = flops_per_token * rate / (peak * devices)
    return {
        "perf/tokens_per_s": rate,
        "perf/tokens_per_s_device": rate / devices,
        "perf/mfu": mfu,
    }


def device_memory_peak_gib(devices: Iterable[Any]) -> float | None:
    """Largest ``peak_bytes_in_use`` among the local jax devices, in GiB; None where none reports it."""
    peaks = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks.append(stats["peak_bytes_in_use"])
    return max(peaks) / _GIB if peaks else None


def host_rss_gib() -> float:
    """Resident memory of this process in GiB (its peak where the system has no /proc)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize() / _GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
