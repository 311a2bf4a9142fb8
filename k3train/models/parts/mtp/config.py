"""Multi-token prediction: one more layer that predicts the token after next (DeepSeek-V3 form). Imports no JAX."""

from typing import Literal

from k3train.config.section import Branch, Section


class MTPConfig(Section, drift="frozen"):
    """One prediction layer: norm both inputs, concatenate, project, one decoder layer, the shared head."""

    mixer: Literal["kda", "mla"] = "mla"
    """Mixer of the prediction layer."""
    ffn: Literal["dense", "moe"] = "moe"
    """Feed-forward network of the prediction layer."""
    loss_weight: Branch[float] = 0.3
    """Factor on the prediction layer's loss."""
