"""Devices to named axes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from k3train.config.errors import UserError
from k3train.parallel.config import AXES, MeshConfig


def build_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of a run, all axes Auto.

    Args:
      cfg: sizes; -1 takes what is left.
      devices: ``jax.Device`` of all processes; default all there are.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = axis_sizes(cfg, len(devices))
    # make_mesh orders the devices by the interconnect where it knows it (TPU).
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def axis_sizes(cfg: MeshConfig, devices: int) -> tuple[int, ...]:
    """Sizes along ``AXES`` for so many devices, -1 filled in.

    Raises:
      UserError: they do not multiply to ``devices``.
    """
    sizes = {axis: getattr(cfg, axis) for axis in AXES}
    given = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if devices % given or (not free and given != devices):
        asked = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "a mesh of one device"
        cure = f"choose sizes whose product divides {devices}" if free else "set one of them to -1 to take what is left"
        raise UserError(f"{asked} does not fit {devices} device{'s' * (devices != 1)}: {cure}")
    return tuple(devices // given if size == -1 else size for size in sizes.values())
