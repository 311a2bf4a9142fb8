"""The mesh section: how many devices along each named axis. Imports no JAX."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3train.config.section import NonNegative, Positive, Section
from k3train.parallel.moonep.config import Options

AxisSize = Annotated[int, Field(ge=-1)]

AXES = ("replica", "fsdp", "expert", "context", "tensor")
"""Mesh axes, outermost first: neighbours on ``tensor`` are neighbours in the device order."""
ROW_AXES = ("replica", "fsdp", "expert")
"""Axes that share out the rows of a batch."""
TOKEN_AXES = ("context", "tensor")
"""Axes that share out the tokens of a row; ``tensor`` outside of the projections only."""


class MeshConfig(Section, drift="free"):
    """Devices along each axis; one axis may be -1 and takes what is left."""

    replica: AxisSize = -1
    """Copies of the parameters; each takes a share of the batch. Put it across slow links."""
    fsdp: AxisSize = 1
    """Shards of parameters, moments and gradients (ZeRO-3); each takes a share of the batch too."""
    expert: AxisSize = 1
    """Shards of the experts; each takes a share of the batch too, and tokens travel to their experts."""
    context: AxisSize = 1
    """Shards of each row: long sequences."""
    tensor: AxisSize = 1
    """Shards of heads and feed-forward widths; between the projections it shares out each row's tokens."""
    replicated_limit_mib: NonNegative = 64
    """Largest parameter array, in MiB, that may lie whole on every device although the mesh has shards."""

    @model_validator(mode="after")
    def _one_free_axis(self) -> "MeshConfig":
        sizes = {axis: getattr(self, axis) for axis in AXES}
        if 0 in sizes.values():
            raise ValueError("mesh axes are positive, or -1 for the devices that are left")
        free = [axis for axis, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(
                f"at most one mesh axis may be -1 and take the devices that are left; here {' and '.join(free)} are "
                "(replica is by default: give it a number)"
            )
        return self

    def known(self, axes: tuple[str, ...]) -> dict[str, int]:
        """Key and size of those of ``axes`` that are larger than 1 before the devices are counted."""
        return {f"mesh.{axis}": getattr(self, axis) for axis in axes if getattr(self, axis) > 1}

    def ways(self, axes: tuple[str, ...]) -> int:
        """Product of their sizes as far as they are known; a free axis counts as 1."""
        return math.prod(self.known(axes).values())


class MoonEPConfig(Section, drift="free"):
    """Experts spread over ``mesh.expert``: every device computes equally many rows, whatever the router chooses."""

    transport: Literal["auto", "gather", "padded", "ragged"] = "auto"
    """How tokens travel: all of them to all (gather), in equal parts (padded), or as they are needed (ragged)."""
    redundant_slots: Positive = 2
    """Experts of other devices that one has room for at a time; a batch that needs more takes further rounds."""
    capacity: Positive | None = None
    """Rows of a pair of devices in one phase of padded; null: a quarter more than evenly spread choices need."""
    check: bool = False
    """Compare the first step of an attempt with experts that do not travel: slow, and all of them on every device."""

    @property
    def options(self) -> Options:
        """What the layer reads."""
        return Options(self.transport, self.redundant_slots, self.capacity)
