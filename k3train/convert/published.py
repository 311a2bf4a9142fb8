"""Published ``config.json`` of Kimi K3 and Kimi-Linear, read as our model section. Imports no JAX."""

from k3train.config.errors import UserError
from k3train.models.config import ModelConfig


def is_k3(text: dict) -> bool:
    """Whether a text config is K3's; its ``model_type`` equals Kimi-Linear's, so keys tell (k3-facts 1.1)."""
    return "attn_res_block_size" in text or "routed_expert_hidden_size" in text


def tensor_prefix(config: dict) -> str:
    """What published tensor names begin with."""
    return "language_model." if "text_config" in config else ""


def model_config(config: dict) -> ModelConfig:
    """Our model section of a published ``config.json``.

    Raises:
      UserError: where a key is missing or asks for what the house does not have.
    """
    text = config.get("text_config", config)
    try:
        return ModelConfig.model_validate(_section(text))
    except KeyError as error:
        raise UserError(
            f"published config has no key {error.args[0]!r}; it is not a Kimi K3 or Kimi-Linear config"
        ) from None


def _section(text: dict) -> dict:
    k3, linear = is_k3(text), text["linear_attn_config"]
    activation = {"kind": "swiglu"}
    if text["hidden_act"] == "situ":
        activation = {
            "kind": "situ",
            "beta": text["activation_situ_beta"],
            "linear_beta": text.get("activation_situ_linear_beta"),
        }
    bound = linear.get("gate_lower_bound")
    return {
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "norm_eps": text["rms_norm_eps"],
        "init_std": text["initializer_range"],
        "tie_embeddings": text["tie_word_embeddings"],
        "activation": activation,
        "layers": {
            "count": text["num_hidden_layers"],
            "kda": linear["kda_layers"],
            "mla": linear["full_attn_layers"],
            "first_dense": text["first_k_dense_replace"],
            "moe_every": text["moe_layer_freq"],
        },
        "kda": {
            "num_heads": linear["num_heads"],
            "head_dim": linear["head_dim"],
            "conv_size": linear["short_conv_kernel_size"],
            "gate": "softplus" if bound is None else "bounded",
            "output_gate": "full" if linear.get("use_full_rank_gate") else "low_rank",
            "a_log_stored_multiple": 128 if k3 else 0,
        }
        | ({} if bound is None else {"gate_lower_bound": bound}),
        "mla": {
            "num_heads": text["num_attention_heads"],
            "q_lora_rank": text["q_lora_rank"],
            "kv_lora_rank": text["kv_lora_rank"],
            "qk_nope_head_dim": text["qk_nope_head_dim"],
            "qk_shared_head_dim": text["qk_rope_head_dim"],
            "v_head_dim": text["v_head_dim"],
            "output_gate": text.get("mla_use_output_gate", False),
        },
        "ffn": {"intermediate_size": text["intermediate_size"]},
        "moe": _experts(text),
        "attn_residual": {"kind": "block", "block_size": text["attn_res_block_size"]} if k3 else {"kind": "none"},
    }


def _experts(text: dict) -> dict:
    return {
        "num_experts": text["num_experts"],
        "top_k": text["num_experts_per_token"],
        "intermediate_size": text["moe_intermediate_size"],
        "num_shared": text["num_shared_experts"],
        "latent_size": text.get("routed_expert_hidden_size"),
        "latent_norm": text.get("latent_moe_use_norm", False),
        "router": {
            "score": text["moe_router_activation_func"],
            "renormalize": text["moe_renormalize"],
            "scale": text["routed_scaling_factor"],
            "groups": text["num_expert_group"],
            "groups_used": text["topk_group"],
        },
    }
