"""Published checkpoint name of an RMSNorm weight, relative to the norm."""

from k3train.models.stored import Stored


def names() -> dict[str, Stored]:
    """Our attribute path to where its array is stored."""
    return {"weight": Stored("weight")}
