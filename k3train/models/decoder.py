"""The language model: embedding -> layer stack -> last mix over depth -> norm -> head. Start reading here.

A :class:`Decoder` holds no arrays. Parameters and buffers (router biases) are plain nested dicts that go in and
come out; every method is a pure function of them.

Shapes: B batch, T tokens, D hidden, V vocabulary, N rows of the attention-residual bank.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.attn_residual.api import Row
from k3train.kernels.config import KernelsConfig
from k3train.models.config import LayerKind, ModelConfig
from k3train.models.module import ModuleDef
from k3train.models.parts.attn_residual.layer import AttnResidual
from k3train.models.parts.embedding.layer import Embedding
from k3train.models.parts.head.layer import Head
from k3train.models.parts.mtp.layer import MTPEntry
from k3train.models.parts.norm.layer import RMSNorm
from k3train.models.stack import Stack
from k3train.parallel import activations
from k3train.parallel.moonep.config import Options
from k3train.parallel.weights import gather_weights


class Hidden(NamedTuple):
    """What the decoder hands to the loss.

    Attributes:
      main: [B, T, D] final hidden states; the head turns them into logits of the next token.
      mtp: [B, T, D] hidden states that predict the token after next, or None.
      stats: statistics by name, [layers that have it, ...]; no gradient.
    """

    main: jax.Array
    mtp: jax.Array | None
    stats: dict[str, jax.Array]


class Exit(nnx.Module):
    """The way out of a stack: one more mix over depth, then the norm."""

    def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
        if cfg.attn_residual.kind != "none":
            self.residual = AttnResidual(cfg.hidden_size, cfg.norm_eps, rngs=rngs)
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps, rngs=rngs)

    def __call__(self, prefix: jax.Array, bank: jax.Array | None) -> jax.Array:
        """Final hidden states [B, T, D] of the running sum [B, T, D] and the bank [N, B, T, D]."""
        if bank is None:
            return self.norm(prefix)
        mixed, _ = self.residual(bank, jnp.int32(bank.shape[0]), [Row(prefix, True)])
        return self.norm(mixed)


class Decoder:
    """Pure functions of one model; shapes in the module's docstring."""

    def __init__(
        self,
        cfg: ModelConfig,
        kernels: KernelsConfig,
        *,
        remat: Literal["full", "none"] = "full",
        balance_bins: int = 0,
        moonep: Options = Options(),
    ):
        self.cfg = cfg
        hidden, eps, std = cfg.hidden_size, cfg.norm_eps, cfg.init_std
        layers = cfg.layers.count
        self._modules = {
            "embedding": ModuleDef(lambda rngs: Embedding(cfg.vocab_size, hidden, std, rngs=rngs)),
            "exit": ModuleDef(lambda rngs: Exit(cfg, rngs=rngs)),
        }
        if not cfg.tie_embeddings:
            self._modules["head"] = ModuleDef(lambda rngs: Head(hidden, cfg.vocab_size, std, rngs=rngs))
        self.stacks = {
            "layers": Stack(
                cfg,
                kernels,
                cfg.layers.kinds(),
                cfg.attn_residual.block_starts(layers),
                remat=remat,
                balance_bins=balance_bins,
                moonep=moonep,
            )
        }
        if cfg.mtp is not None:
            kind = LayerKind(cfg.mtp.mixer, cfg.mtp.ffn)
            self._modules["mtp_entry"] = ModuleDef(lambda rngs: MTPEntry(hidden, eps, std, rngs=rngs))
            self._modules["mtp_exit"] = ModuleDef(lambda rngs: Exit(cfg, rngs=rngs))
            self.stacks["mtp_layers"] = Stack(
                cfg,
                kernels,
                [kind],
                cfg.attn_residual.block_starts(1),
                remat=remat,
                balance_bins=balance_bins,
                moonep=moonep,
            )

    # -- parameters ---------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """Fresh float32 parameters and buffers; each part's draw depends on the key and the part's name alone."""
        params, buffers = {}, {}
        parts = {**self._modules, **self.stacks}
        for name, part in parts.items():
            number = sum(ord(c) << (8 * (i % 3)) for i, c in enumerate(name))
            params[name], buffers[name] = part.init(jax.random.fold_in(key, number))
        return params, {name: held for name, held in buffers.items() if held}

    def abstract(self) -> tuple[dict, dict]:
        """Shapes and dtypes of :meth:`init`'s result, nothing allocated."""
        return jax.eval_shape(self.init, jax.random.key(0))

    def specs(self) -> dict:
        """The :class:`k3train.models.param.ParamSpec` of every parameter, in the parameters' nesting."""
        return {
            **{name: part.specs for name, part in self._modules.items()},
            **{name: stack.specs() for name, stack in self.stacks.items()},
        }

    def _bind(self, name: str, params: dict) -> Any:
        held = params[name] if name == "embedding" else gather_weights(params[name], self._modules[name].specs)
        return self._modules[name].bind(held, {})

    # -- forward ------------------------------------------------------------------------------------------------

    def __call__(
        self,
        params: dict,
        buffers: dict,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        next_tokens: jax.Array | None = None,
    ) -> Hidden:
        """Runs the model.

        Args:
          params, buffers: of :meth:`init`, parameters in the compute dtype.
          tokens: [B, T] int32.
          segment_ids: [B, T] int32 document of each token in its row, 0 for padding; None for one document a row.
          next_tokens: [B, T] int32, the token after each, for multi-token prediction; None leaves it out.
        """
        embedding = self._bind("embedding", params)
        x = activations.hidden(embedding(tokens))
        prefix, bank, stats = self.stacks["layers"](params["layers"], buffers.get("layers", {}), x, segment_ids)
        main = self._bind("exit", params)(prefix, bank)
        mtp = None
        if next_tokens is not None and "mtp_layers" in self.stacks:
            joined = activations.hidden(self._bind("mtp_entry", params)(main, embedding(next_tokens)))
            prefix, bank, mtp_stats = self.stacks["mtp_layers"](
                params["mtp_layers"], buffers.get("mtp_layers", {}), joined, segment_ids
            )
            mtp = self._bind("mtp_exit", params)(prefix, bank)
            stats = stats | {f"mtp_{name}": value for name, value in mtp_stats.items()}
        return Hidden(main, mtp, stats)

    def head(self, params: dict) -> jax.Array:
        """The output matrix [D, V]."""
        return params["embedding"]["table"].T if self.cfg.tie_embeddings else params["head"]["weight"]

    def logits(self, params: dict, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of final hidden states [..., D]; for a few positions, the loss does without."""
        return hidden @ self.head(params)

    # -- decoding -----------------------------------------------------------------------------------------------

    def init_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> dict:
        """Empty decode cache for up to ``capacity`` tokens a row: KDA states and taps, MLA latents."""
        return self.stacks["layers"].init_cache(batch, capacity, dtype)

    def extend(
        self, params: dict, buffers: dict, tokens: jax.Array, valid: jax.Array, cache: dict
    ) -> tuple[jax.Array, dict]:
        """Runs new tokens [B, T] int32 after those in the cache; ``valid`` [B, T] bool is false only at the end.

        Returns:
          Final hidden states [B, T, D] and the new cache.
        """
        x = self._bind("embedding", params)(tokens)
        prefix, bank, cache = self.stacks["layers"].extend(params["layers"], buffers.get("layers", {}), x, valid, cache)
        return self._bind("exit", params)(prefix, bank), cache
