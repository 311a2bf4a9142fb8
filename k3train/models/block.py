"""One decoder layer: mixer and feed-forward, each reading the depth through attention residuals.

Layer order (k3-facts 1.6, 4.3): mix -> norm -> {KDA | MLA} -> add; mix -> norm -> {dense | experts} -> add.
Shapes: B batch, T tokens, D hidden, N rows of the bank.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.attn_residual.api import Row
from k3train.kernels.config import KernelsConfig
from k3train.models.config import LayerKind, ModelConfig
from k3train.models.parts.attn_residual.layer import AttnResidual
from k3train.models.parts.ffn.layer import FFN
from k3train.models.parts.kda.layer import KDA
from k3train.models.parts.mla.layer import MLA
from k3train.models.parts.moe.layer import MoE
from k3train.models.parts.norm.layer import RMSNorm
from k3train.parallel.activations import enter, leave
from k3train.parallel.moonep.config import Options


class Depth(NamedTuple):
    """What a layer sees of the layers before it.

    Attributes:
      prefix: [B, T, D] running sum of the block (of everything, without attention residuals).
      bank: [N, B, T, D] the sums at which blocks were opened; None without attention residuals.
      filled: int32 scalar, rows of the bank that are written.
    """

    prefix: jax.Array
    bank: jax.Array | None
    filled: jax.Array


class DecoderLayer(nnx.Module):
    """A layer of one :class:`LayerKind`. Which sub-layers open a block is data, so layers of a kind scan."""

    def __init__(
        self,
        cfg: ModelConfig,
        kind: LayerKind,
        kernels: KernelsConfig,
        balance_bins: int,
        moonep: Options = Options(),
        *,
        rngs: nnx.Rngs,
    ):
        hidden, eps, std = cfg.hidden_size, cfg.norm_eps, cfg.init_std
        self.input_norm = RMSNorm(hidden, eps, rngs=rngs)
        self.post_norm = RMSNorm(hidden, eps, rngs=rngs)
        if cfg.attn_residual.kind != "none":
            self.mixer_residual = AttnResidual(hidden, eps, rngs=rngs)
            self.ffn_residual = AttnResidual(hidden, eps, rngs=rngs)
        if kind.mixer == "kda":
            assert cfg.kda is not None
            self.mixer = KDA(cfg.kda, hidden, eps, std, kernels, rngs=rngs)
        else:
            assert cfg.mla is not None
            self.mixer = MLA(cfg.mla, hidden, std, kernels, rngs=rngs)
        if kind.ffn == "dense":
            assert cfg.ffn is not None
            self.ffn = FFN(cfg.ffn.intermediate_size, hidden, cfg.activation, std, rngs=rngs)
        else:
            assert cfg.moe is not None
            self.ffn = MoE(cfg.moe, hidden, cfg.activation, eps, std, kernels, balance_bins, moonep, rngs=rngs)

    def _read(self, residual: str, depth: Depth, rows: list[Row]) -> tuple[jax.Array, dict]:
        """The sub-layer's input: mixed over depth, or the running sum itself."""
        if depth.bank is None:
            return rows[-1].value, {}
        return getattr(self, residual)(depth.bank, depth.filled, rows)

    def _feed(self, x: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, dict]:
        if isinstance(self.ffn, MoE):
            return self.ffn(x, segment_ids)
        return leave(self.ffn(enter(x))), {}

    def __call__(
        self, depth: Depth, starts: jax.Array, segment_ids: jax.Array | None, mixer=None
    ) -> tuple[jax.Array, jax.Array, dict]:
        """Runs the layer; the caller writes the bank (``stack.write_row``).

        Args:
          depth: what the layer reads; not changed.
          starts: bool [2], whether (mixer, feed-forward) open a block.
          segment_ids: [B, T] int32 document of each token, 0 for padding; None for one document a row.
          mixer: stands in for the mixer's call, for decoding with a cache.

        Returns:
          The running sum [B, T, D] after the mixer and after the feed-forward, and statistics by name.
        """
        start = depth.prefix
        x, mixer_stats = self._read("mixer_residual", depth, [Row(start, True)])
        with jax.named_scope(type(self.mixer).__name__.lower()):
            y, stats = (mixer or self.mixer)(enter(self.input_norm(x)), segment_ids)
            y = leave(y)
        middle = jnp.where(starts[0], jnp.zeros_like(start), start) + y
        x, ffn_stats = self._read("ffn_residual", depth, [Row(start, starts[0]), Row(middle, True)])
        with jax.named_scope("ffn"):
            y, more = self._feed(self.post_norm(x), segment_ids)
        end = jnp.where(starts[1], jnp.zeros_like(middle), middle) + y
        depth_stats = {f"attnres_{k}": jnp.stack([mixer_stats[k], ffn_stats[k]]) for k in mixer_stats}
        return middle, end, stats | more | depth_stats
