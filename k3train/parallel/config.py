"""The mesh section: how many devices along each named axis. Imports no JAX."""

from typing import Annotated

from pydantic import Field, model_validator

from k3train.config.section import Section

AxisSize = Annotated[int, Field(ge=-1)]


class MeshConfig(Section, drift="free"):
    """Devices along each axis; one axis may be -1 and takes what is left."""

    data: AxisSize = -1
    """Replicas of the parameters; each takes a share of the batch."""
    fsdp: AxisSize = 1
    """Shards of the parameters (ZeRO-3); each takes a share of the batch too."""

    @model_validator(mode="after")
    def _one_free_axis(self) -> "MeshConfig":
        sizes = (self.data, self.fsdp)
        if 0 in sizes or sizes.count(-1) > 1:
            raise ValueError("mesh axes are positive, and at most one is -1 (it takes the devices that are left)")
        return self
