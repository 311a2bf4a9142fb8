"""Gated feed-forward networks: activation, sizes and counts (k3-facts 5.2). Imports no JAX."""

from typing import Literal

from k3train.config.section import Positive, PositiveFloat, Section


class ActivationConfig(Section, drift="frozen"):
    """Gated activation: SiTU-GLU (K3) or SwiGLU (Kimi-Linear)."""

    kind: Literal["situ", "swiglu"] = "situ"
    """SiTU-GLU, whose branches are bounded, or SwiGLU."""
    beta: PositiveFloat = 4.0
    """Bound of the gate branch (SiTU)."""
    linear_beta: PositiveFloat | None = 25.0
    """Bound of the linear branch (SiTU); none leaves it unbounded."""


class FFNConfig(Section, drift="frozen"):
    """The dense feed-forward network of the layers without experts."""

    intermediate_size: Positive
    """Width between up and down projection."""

    def parameters(self, hidden: int) -> int:
        """Trainable elements: gate, up and down."""
        return 3 * hidden * self.intermediate_size
