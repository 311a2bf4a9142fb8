"""Mixture of experts, in a latent space or not: sizes and counts (k3-facts 5). Imports no JAX."""

from k3train.config.section import NonNegative, Positive, Section
from k3train.models.parts.router.config import RouterConfig


class MoEConfig(Section, drift="frozen"):
    """Routed experts of width ``intermediate_size``, shared experts, and the latent space between."""

    num_experts: Positive
    """Routed experts."""
    top_k: Positive
    """Routed experts a token takes."""
    intermediate_size: Positive
    """Width inside an expert."""
    num_shared: NonNegative = 0
    """Shared experts; they act as one network of ``num_shared`` times the expert width."""
    latent_size: Positive | None = None
    """Width in which experts live (Stable LatentMoE); none keeps the hidden width."""
    latent_norm: bool = True
    """RMSNorm after the experts' weighted sum, before the way back up (latent form only)."""
    router: RouterConfig = RouterConfig()

    def expert_width(self, hidden: int) -> int:
        """Width of an expert's input and output."""
        return self.latent_size or hidden

    def products(self, hidden: int) -> dict[str, int]:
        """Weights of the matrices, by kind: router, latent, shared, and all routed experts."""
        return {
            "router": hidden * self.num_experts,
            "latent": 2 * hidden * self.latent_size if self.latent_size else 0,
            "shared": 3 * hidden * self.num_shared * self.intermediate_size,
            "experts": self.num_experts * 3 * self.expert_width(hidden) * self.intermediate_size,
        }

    def idle(self, hidden: int) -> int:
        """Weights of the routed experts that one token does not use."""
        return (self.num_experts - self.top_k) * 3 * self.expert_width(hidden) * self.intermediate_size

    def matmul_parameters(self, hidden: int) -> int:
        """Weights that one token is multiplied by: the chosen experts' and the common ones."""
        return sum(self.products(hidden).values()) - self.idle(hidden)

    def norm_parameters(self) -> int:
        """Weights of the norm after the combine."""
        return self.latent_size if self.latent_size and self.latent_norm else 0

    def parameters(self, hidden: int) -> int:
        """Trainable elements (the router bias is not: it is balanced, not learned)."""
        return sum(self.products(hidden).values()) + self.norm_parameters()
