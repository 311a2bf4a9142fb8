"""Gated multi-head latent attention without positions: sizes and counts (k3-facts 3). Imports no JAX."""

from k3train.config.section import Positive, PositiveFloat, Section


class MLAConfig(Section, drift="frozen"):
    """Sizes and variants of an MLA mixer. Keys are [nope | shared]; the shared part is never rotated."""

    num_heads: Positive
    """Heads, as many for keys and values as for queries."""
    q_lora_rank: Positive | None = None
    """Rank of the query's low-rank path; none projects the query directly (Kimi-Linear)."""
    kv_lora_rank: Positive = 512
    """Width of the latent that all heads' keys and values come from; decoding caches it."""
    qk_nope_head_dim: Positive = 128
    """Width of the query and key part of each head's own."""
    qk_shared_head_dim: Positive = 64
    """Width of the key part shared by all heads (``qk_rope_head_dim`` of the release; unrotated)."""
    v_head_dim: Positive = 128
    """Width of a head's values."""
    output_gate: bool = True
    """Multiply the heads' outputs by a sigmoid gate of the layer's input (K3)."""
    latent_norm_eps: PositiveFloat = 1e-6
    """Epsilon of the two latent norms; the released code uses its default here, not ``norm_eps``."""

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head; the softmax scale is its inverse square root."""
        return self.qk_nope_head_dim + self.qk_shared_head_dim

    @property
    def width(self) -> int:
        """Width of the attention output: heads x v_head_dim."""
        return self.num_heads * self.v_head_dim

    def matmul_parameters(self, hidden: int) -> int:
        """Weights that a token is multiplied by."""
        q_out = self.num_heads * self.qk_head_dim
        query = hidden * q_out if self.q_lora_rank is None else self.q_lora_rank * (hidden + q_out)
        kv_down = hidden * (self.kv_lora_rank + self.qk_shared_head_dim)
        kv_up = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + kv_down + kv_up + (1 + self.output_gate) * hidden * self.width

    def parameters(self, hidden: int) -> int:
        """Trainable elements: the matrices and the latent norms."""
        return self.matmul_parameters(hidden) + self.kv_lora_rank + (self.q_lora_rank or 0)

    def attention_flops(self, length: int) -> int:
        """Forward FLOPs a token of scores and weighted values, half of the square (causal)."""
        return self.num_heads * (self.qk_head_dim + self.v_head_dim) * length
