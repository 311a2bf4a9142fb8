"""Published names of the attention-residual parameters, after the sub-layer's prefix. Imports no JAX."""

from k3train.models.stored import Stored


def names() -> dict[str, Stored]:
    """Our attribute paths to published tensors, for one sub-layer (``self_attention_res``, ``mlp_res``, ...)."""
    return {"norm": Stored("_norm.weight"), "query": Stored("_proj.weight", "row")}
