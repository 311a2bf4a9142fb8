"""Mixture of experts, in a latent space or not, with shared experts (k3-facts 5).

``y = up(norm(sum_e p_e expert_e(down(x)))) + shared(x)``; without a latent space the sum is the routed
output itself. The router reads the full hidden state.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.kernels.quantile_histogram.api import histogram
from k3train.models.param import Buffer, matrix
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import FFN
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.moe.experts import routed_experts
from k3train.models.parts.norm.layer import RMSNorm
from k3train.models.parts.router.layer import Routing, route


class MoE(nnx.Module):
    """Routed and shared experts; ``balance_bins`` > 0 adds the histogram of quantile balancing to the stats."""

    def __init__(
        self,
        cfg: MoEConfig,
        hidden: int,
        activation: ActivationConfig,
        norm_eps: float,
        init_std: float,
        kernels: KernelsConfig,
        balance_bins: int,
        *,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.activation, self.kernels, self.balance_bins = cfg, activation, kernels, balance_bins
        experts, latent, width = cfg.num_experts, cfg.expert_width(hidden), cfg.intermediate_size
        outer = "embed" if cfg.latent_size is None else "latent"
        self.router = matrix(rngs, (hidden, experts), init_std, ("embed", None))
        self.router_bias = Buffer(jnp.zeros(experts, jnp.float32))
        if cfg.latent_size is not None:
            self.latent_down = matrix(rngs, (hidden, latent), init_std, ("embed", "latent"))
            self.latent_up = matrix(rngs, (latent, hidden), init_std, ("latent", "embed"))
            if cfg.latent_norm:
                self.latent_norm = RMSNorm(latent, norm_eps, rngs=rngs, axes=("latent",))
        self.w1 = matrix(rngs, (experts, latent, width), init_std, ("experts", outer, "expert_mlp"))
        self.w3 = matrix(rngs, (experts, latent, width), init_std, ("experts", outer, "expert_mlp"))
        self.w2 = matrix(rngs, (experts, width, latent), init_std, ("experts", "expert_mlp", outer))
        if cfg.num_shared:
            self.shared = FFN(cfg.num_shared * width, hidden, activation, init_std, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Applies the experts to every token; statistics count valid tokens only.

        Args:
          x: [B, T, D] normed hidden states.
          segment_ids: [B, T] int, 0 for padding; all tokens are valid if absent.

        Returns:
          (y [B, T, D] in the dtype of ``x``, stats without gradient: ``load`` [E] int32 assignments,
          ``router_entropy`` mean entropy in nats of the scores normalised over experts, and, with
          ``balance_bins``, ``histogram`` [E, bins] int32).
        """
        cfg = self.cfg
        flat = x.reshape(-1, x.shape[-1])  # [N, D]
        valid = jnp.ones(flat.shape[0], bool) if segment_ids is None else segment_ids.reshape(-1) != 0
        routing = route(flat, self.router[...], self.router_bias[...], cfg.router, cfg.top_k)
        latent = cfg.latent_size is not None
        z = flat @ self.latent_down[...].astype(x.dtype) if latent else flat
        matrices = self.w1[...], self.w3[...], self.w2[...]
        y = routed_experts(z, routing.ids, routing.weights, matrices, self.activation, self.kernels)
        if latent:
            # The norm reads the wide sum; rounding comes after it.
            y = (self.latent_norm(y) if cfg.latent_norm else y).astype(x.dtype) @ self.latent_up[...].astype(x.dtype)
        y = y.astype(x.dtype)
        if cfg.num_shared:
            y = y + self.shared(flat)
        return y.reshape(x.shape), self._stats(routing, valid)

    def _stats(self, routing: Routing, valid: jax.Array) -> dict[str, jax.Array]:
        ids, _, scores, cutoff = jax.lax.stop_gradient(routing)
        counts = jnp.broadcast_to(valid[:, None], ids.shape).astype(jnp.int32)
        share = scores / jnp.sum(scores, axis=1, keepdims=True)
        entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)  # [N]
        tokens = jnp.maximum(jnp.sum(valid, dtype=entropy.dtype), 1)
        stats = {
            "load": jnp.zeros(self.cfg.num_experts, jnp.int32).at[ids].add(counts),
            "router_entropy": jnp.sum(jnp.where(valid, entropy, 0.0)) / tokens,
        }
        if self.balance_bins:
            stats["histogram"] = histogram(scores, cutoff, self.router_bias[...], valid, self.balance_bins)
        return stats
