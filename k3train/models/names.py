"""Published tensor names of a whole model (k3-facts 11). Imports no JAX at module level beyond the parts' names."""

from typing import NamedTuple

from k3train.models.config import LayerKind, ModelConfig
from k3train.models.parts.attn_residual.names import names as residual_names
from k3train.models.parts.ffn.names import names as ffn_names
from k3train.models.parts.kda.names import names as kda_names
from k3train.models.parts.mla.names import names as mla_names
from k3train.models.parts.moe.names import names as moe_names
from k3train.models.segments import segments
from k3train.models.stored import Stored


class Home(NamedTuple):
    """Where an array lives in our trees.

    Attributes:
      path: keys from the root of parameters or buffers to the array.
      repeat: index on the stack's leading axis, or None.
      buffer: whether the tree is the buffers'.
    """

    path: tuple[str, ...]
    repeat: int | None
    buffer: bool


def _layer_names(cfg: ModelConfig, kind: LayerKind) -> dict[str, Stored]:
    """Our attribute paths within one layer to published names after ``layers.N.``."""
    out = {
        "input_norm.weight": Stored("input_layernorm.weight"),
        "post_norm.weight": Stored("post_attention_layernorm.weight"),
    }
    if cfg.attn_residual.kind != "none":
        for ours, theirs in (("mixer_residual", "self_attention_res"), ("ffn_residual", "mlp_res")):
            out |= {f"{ours}.{k}": v.under(theirs) for k, v in residual_names().items()}
    mixer = kda_names(cfg.kda) if kind.mixer == "kda" else mla_names(cfg.mla)  # type: ignore[arg-type]
    out |= {f"mixer.{k}": v.under("self_attn.") for k, v in mixer.items()}
    if kind.ffn == "dense":
        out |= {f"ffn.{k}": v.under("mlp.") for k, v in ffn_names().items()}
    else:
        out |= {f"ffn.{k}": v.under("block_sparse_moe.") for k, v in moe_names(cfg.moe).items()}  # type: ignore[arg-type]
    return out


def model_names(cfg: ModelConfig, prefix: str = "") -> dict[Home, Stored]:
    """Every array of the main model (multi-token prediction has no published form) and its published tensor.

    Args:
      prefix: before every name: ``language_model.`` for K3, nothing for Kimi-Linear.
    """
    model = f"{prefix}model."
    out = {
        Home(("embedding", "table"), None, False): Stored(f"{model}embed_tokens.weight"),
        Home(("exit", "norm", "weight"), None, False): Stored(f"{model}norm.weight"),
    }
    if cfg.attn_residual.kind != "none":
        out |= {
            Home(("exit", "residual", k), None, False): v.under(f"{model}output_attn_res")
            for k, v in residual_names().items()
        }
    if not cfg.tie_embeddings:
        out[Home(("head", "weight"), None, False)] = Stored(f"{prefix}lm_head.weight", "linear")
    for seg in segments(cfg.layers.kinds()):
        for j, kind in enumerate(seg.kinds):
            for path, stored in _layer_names(cfg, kind).items():
                for r in range(seg.repeats):
                    home = Home(("layers", seg.name, str(j), *path.split(".")), r, path == "ffn.router_bias")
                    out[home] = stored.under(f"{model}layers.{seg.layer(r, j)}.")
    return out
