"""Kimi Delta Attention: sizes and counts (k3-facts 1.4, 2.1). Imports no JAX."""

from typing import Literal

from k3train.config.section import Free, NonNegative, Positive, Section


class KDAConfig(Section, drift="frozen"):
    """Sizes and variants of a KDA mixer; key and value widths are both ``head_dim``."""

    num_heads: Positive
    """Heads; each has its own decay, state and output norm input."""
    head_dim: Positive = 128
    """Width of a head's keys and values, and rank of the decay's low-rank path."""
    conv_size: Positive = 4
    """Taps of the causal depthwise convolution on q, k and v."""
    gate: Literal["bounded", "softplus"] = "bounded"
    """Form of the log-decay: bounded below (K3) or softplus (Kimi-Linear)."""
    gate_lower_bound: float = -5.0
    """Least log-decay per token of the bounded form."""
    output_gate: Literal["full", "low_rank"] = "full"
    """Output gate from one full matrix (K3) or two of rank ``head_dim`` (Kimi-Linear)."""
    a_log_stored_multiple: Free[NonNegative] = 0
    """Published checkpoints store A_log padded with zeros to a multiple of this (K3: 128); 0 for none."""

    @property
    def width(self) -> int:
        """Width of q, k, v and the output: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def a_log_padding(self) -> int:
        """Zeros that the published layout adds to A_log."""
        return -self.num_heads % self.a_log_stored_multiple if self.a_log_stored_multiple else 0

    def matmul_parameters(self, hidden: int) -> int:
        """Weights that a token is multiplied by: q, k, v, o, decay, beta and output gate."""
        rank = self.head_dim
        gate = hidden * self.width if self.output_gate == "full" else rank * (hidden + self.width)
        return 4 * hidden * self.width + rank * (hidden + self.width) + hidden * self.num_heads + gate

    def parameters(self, hidden: int) -> int:
        """Trainable elements: the matrices, three convolutions, dt_bias, A_log and the output norm."""
        small = 3 * self.conv_size * self.width + self.width + self.num_heads + self.head_dim
        return self.matmul_parameters(hidden) + small

    def state_flops(self, chunk: int = 64) -> int:
        """Forward FLOPs a token of the chunked delta rule, triangular inverse not counted."""
        k = v = self.head_dim
        return self.num_heads * (2 * 2 * chunk * k + 2 * 2 * chunk * k + 3 * 2 * k * v + 2 * chunk * v)
