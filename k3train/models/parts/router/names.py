"""Published checkpoint names of the router, relative to ``block_sparse_moe`` (k3-facts 11.1)."""

from k3train.models.stored import Stored


def names() -> dict[str, Stored]:
    """Our attribute path (in the MoE part) to where its array is stored."""
    return {"router": Stored("gate.weight", "linear"), "router_bias": Stored("gate.e_score_correction_bias")}
