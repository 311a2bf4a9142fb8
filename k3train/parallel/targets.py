"""Devices that need not exist: programs are compiled for them ahead of time."""

from typing import Any, Literal

Target = Literal["h200", "v5p", "v6e"]

_H200 = """gpu_device_info { cuda_compute_capability { major: 9 } threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200\""""


def devices(target: Target, count: int) -> list[Any]:
    """``count`` H200, eight a host (needs jax-cuda13-plugin and a ptxas), or v5p or v6e chips (needs libtpu).

    TPU chips come in fours; those of a v6e in powers of two.
    """
    from jax.experimental import topologies

    match target:
        case "h200":
            hosts = max(1, count // 8)
            made = topologies.get_topology_desc(
                platform="cuda", topology_name="h200", target_config=_H200, topology=f"1x{hosts}x{count // hosts}"
            )
        case "v5p":
            made = topologies.get_topology_desc(platform="tpu", topology_name=f"v5p:2x2x{count // 4}")
        case "v6e":
            made = topologies.get_topology_desc(platform="tpu", topology_name=f"v6e:{_square(count)}")
    return list(made.devices)


def _square(count: int) -> str:
    """So many chips, a power of two, as near a square as can be: "4x8"."""
    side = 1 << (count.bit_length() - 1) // 2
    return f"{side}x{count // side}"
