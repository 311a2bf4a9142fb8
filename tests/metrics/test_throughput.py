"""Speed, peaks and memory."""

from types import SimpleNamespace

import jax
import pytest

from k3train.metrics.throughput import device_memory_peak_gib, host_rss_gib, peak_flops, speed


@pytest.mark.parametrize(
    "kind, tflops",
    [
        ("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312), ("NVIDIA B200", 2250), ("TPU v4", 275), ("TPU v5 lite", 197), ("TPU v5p", 459),
        ("TPU v5", 459), ("TPU v6 lite", 918), ("cpu", None), ("NVIDIA H20", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
    ],
)  # fmt: skip
def test_peaks(kind, tflops):
    assert peak_flops(kind) == (None if tflops is None else tflops * 1e12)
    assert peak_flops(kind, "float64") is None


def test_mfu_by_hand():
    values = speed(tokens=1000, seconds=2, devices=4, flops_per_token=8e9, peak=1e12)
    assert values["perf/tokens_per_s"] == 500 and values["perf/tokens_per_s_device"] == 125
    assert values["perf/mfu"] == pytest.approx(8e9 * 500 / 4e12)
    assert speed(1000, 2, 4, 8e9, None)["perf/mfu"] is None
    assert speed(1000, 2, 4, None, 1e12)["perf/mfu"] is None


def test_memory():
    used = [SimpleNamespace(memory_stats=lambda n=n: n) for n in ({"peak_bytes_in_use": 2**30}, None, {})]
    assert device_memory_peak_gib(used) == 1.0
    assert device_memory_peak_gib(used[1:]) is None
    device_memory_peak_gib(jax.local_devices())
    assert 0.01 < host_rss_gib() < 1000
