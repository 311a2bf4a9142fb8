"""Published checkpoint names of a gated feed-forward network, relative to it (k3-facts 11.1)."""

from k3train.models.stored import Stored


def names() -> dict[str, Stored]:
    """Our attribute path to where its array is stored."""
    return {part: Stored(f"{part}.weight", "linear") for part in ("gate_proj", "up_proj", "down_proj")}
