"""Published checkpoint names of a mixture of experts, relative to ``block_sparse_moe`` (k3-facts 11.1, 11.3)."""

from k3train.models.parts.ffn import names as ffn
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.router import names as router
from k3train.models.stored import Stored


def names(cfg: MoEConfig) -> dict[str, Stored]:
    """Our attribute path to where its array is stored; ``{expert}`` stands for one tensor an expert."""
    found = router.names()
    found |= {part: Stored(f"experts.{{expert}}.{part}.weight", "linear") for part in ("w1", "w3", "w2")}
    if cfg.latent_size is not None:
        found["latent_down"] = Stored("routed_expert_down_proj.weight", "linear")
        found["latent_up"] = Stored("routed_expert_up_proj.weight", "linear")
        if cfg.latent_norm:
            found["latent_norm.weight"] = Stored("routed_expert_norm.weight")
    if cfg.num_shared:
        found |= {f"shared.{path}": stored.under("shared_experts.") for path, stored in ffn.names().items()}
    return found
