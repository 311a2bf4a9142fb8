"""Published checkpoint names of an MLA mixer, relative to ``self_attn`` (k3-facts 11.1, 11.3)."""

from k3train.models.parts.mla.config import MLAConfig
from k3train.models.stored import Stored


def names(cfg: MLAConfig) -> dict[str, Stored]:
    """Our attribute path to where its array is stored."""
    query = ["q_proj"] if cfg.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
    gate = ["g_proj"] if cfg.output_gate else []
    found = {part: Stored(f"{part}.weight", "linear") for part in [*query, *gate, "kv_b_proj", "o_proj"]}
    found["kv_a_proj"] = Stored("kv_a_proj_with_mqa.weight", "linear")
    found["kv_a_norm.weight"] = Stored("kv_a_layernorm.weight")
    if cfg.q_lora_rank is not None:
        found["q_a_norm.weight"] = Stored("q_a_layernorm.weight")
    return found
