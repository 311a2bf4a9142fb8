"""Mixture of experts, in a latent space or not, with shared experts (k3-facts 5).

``y = up(norm(sum_e p_e expert_e(down(x)))) + shared(x)``; without a latent space the sum is the routed
output itself. The router reads the full hidden state.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3train.kernels.config import KernelsConfig
from k3train.kernels.quantile_histogram.api import histogram
from k3train.models.param import Buffer, matrix
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import FFN, glu
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.moe.experts import Matrices, routed_experts
from k3train.models.parts.norm.layer import RMSNorm
from k3train.models.parts.router.layer import Routing, route
from k3train.parallel.activations import ALL_AXES, ROWS, TOKENS, axis_size, enter, leave, names, on_each_device, split
from k3train.parallel.moonep.config import Options
from k3train.parallel.moonep.routed import routed


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
        moonep: Options = Options(),
        *,
        rngs: nnx.Rngs,
    ):
        self.cfg, self.activation, self.kernels = cfg, activation, kernels
        self.balance_bins, self.moonep = balance_bins, moonep
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
          ``router_entropy`` mean entropy in nats of the scores normalised over experts, with
          ``balance_bins`` ``histogram`` [E, bins] int32, and, with experts spread over the mesh, of all groups of ranks
          the largest ``rank_load`` (before levelling, over the mean), ``redundant`` (experts of a rank) and
          ``rounds``, float32).
        """
        cfg = self.cfg
        z = x @ self.latent_down[...].astype(x.dtype) if cfg.latent_size is not None else x
        if segment_ids is None:
            segment_ids = jnp.ones(x.shape[:2], jnp.int32)
        where = split(x.shape, (ROWS, TOKENS))
        here, whole = P(*where, None), P()
        spread = P("expert") if self._travels() else whole
        y, stats = on_each_device(
            partial(self._routed, axes=names(where[0]) + names(where[1])),
            (x, z, segment_ids, self.router[...], self.router_bias[...], (self.w1[...], self.w3[...], self.w2[...])),
            (here, here, where, whole, whole, spread),
            (here, whole),
        )
        if cfg.latent_size is not None:
            # The norm reads the wide sum; rounding comes after it.
            y = (self.latent_norm(y) if cfg.latent_norm else y).astype(x.dtype) @ self.latent_up[...].astype(x.dtype)
        y = y.astype(x.dtype)
        if cfg.num_shared:
            y = y + leave(self.shared(enter(x)))
        return y, stats

    def _travels(self) -> bool:
        """Whether experts are spread over the mesh."""
        return axis_size("expert") > 1 and not self.moonep.everywhere

    def _routed(
        self,
        x: jax.Array,
        z: jax.Array,
        segment_ids: jax.Array,
        router: jax.Array,
        bias: jax.Array,
        matrices: Matrices,
        axes: tuple[str, ...],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The routed experts' sum [B, T, L] wide of a device's tokens, and statistics over ``axes``, which split the
        tokens."""
        cfg = self.cfg
        flat, valid = x.reshape(-1, x.shape[-1]), segment_ids.reshape(-1) != 0
        routing = route(flat, router, bias, cfg.router, cfg.top_k)
        rows = z.reshape(-1, z.shape[-1])
        stats = self._stats(routing, valid, bias, axes)
        if not self._travels():
            y = routed_experts(rows, routing.ids, routing.weights, matrices, self.activation, self.kernels)
        else:
            y, done = routed(
                rows,
                routing.ids,
                routing.weights,
                matrices,
                axis="expert",
                activation=partial(glu, activation=self.activation),
                options=self.moonep,
                implementation=self.kernels.grouped_matmul,
                block=self.kernels.grouped_matmul_block,
            )
            stats |= _of_all_ranks(done)
        return y.reshape(*z.shape[:2], -1), stats

    def _stats(
        self, routing: Routing, valid: jax.Array, bias: jax.Array, axes: tuple[str, ...]
    ) -> dict[str, jax.Array]:
        ids, _, scores, cutoff = jax.lax.stop_gradient(routing)
        counts = jnp.broadcast_to(valid[:, None], ids.shape).astype(jnp.int32)
        share = scores / jnp.sum(scores, axis=1, keepdims=True)
        entropy = -jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)  # [N]
        sums = {
            "load": jnp.zeros(self.cfg.num_experts, jnp.int32).at[ids].add(counts),
            "entropy": jnp.sum(jnp.where(valid, entropy, 0.0)),
            "tokens": jnp.sum(valid, dtype=entropy.dtype),
        }
        if self.balance_bins:
            sums["histogram"] = histogram(scores, cutoff, bias, valid, self.balance_bins)
        if axes:
            sums = jax.lax.psum(sums, axes)
        entropy, tokens = sums.pop("entropy"), sums.pop("tokens")
        return {**sums, "router_entropy": entropy / jnp.maximum(tokens, 1)}


def _of_all_ranks(done: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What levelling the ranks took (``moonep/routed.py``), the largest over the mesh."""
    load = done["load_before"].astype(jnp.float32)
    most = {
        "rank_load": jnp.max(load) / jnp.mean(load),
        "redundant": jnp.max(done["redundant_experts"]).astype(jnp.float32),
        "rounds": done["rounds"].astype(jnp.float32),
    }
    return jax.lax.pmax(jax.lax.stop_gradient(most), [name for name in ALL_AXES if axis_size(name) > 1])
