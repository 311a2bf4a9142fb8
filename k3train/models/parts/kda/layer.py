"""The Kimi Delta Attention mixer: projections, short convolutions, decay, delta rule, gated norm (k3-facts 2.1).

B rows, T tokens, D hidden, H heads, K width of a head's keys and values, W conv taps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from k3train.kernels.causal_conv.api import causal_conv, next_taps
from k3train.kernels.config import KernelsConfig
from k3train.kernels.kda.api import Implementation, kda_from_raw
from k3train.kernels.kda.gate import kda_gate
from k3train.kernels.numerics import wide, wide_dtype
from k3train.models.param import matrix, ones, param, zeros
from k3train.models.parts.kda.config import KDAConfig
from k3train.parallel.activations import ROWS, heads, on_each_device, split
from k3train.parallel.neighbours import from_left


class KDACache(NamedTuple):
    """What decoding keeps of the tokens so far; its size does not grow with them.

    Attributes:
      state: [B, H, K, K], wide; key axis first.
      taps: [B, W-1, 3HK] last inputs of the q, k and v convolutions, in compute dtype.
    """

    state: jax.Array
    taps: jax.Array


class Weights(NamedTuple):
    """What some heads bring to the mixing between the projections."""

    convs: tuple
    """Taps of the q, k and v convolutions, each [W, HK]."""
    a_log: Any
    """[H]."""
    dt_bias: Any
    """[HK]."""


class KDA(nnx.Module):
    """KDA mixer, in K3's or Kimi-Linear's variant by its config."""

    def __init__(
        self, cfg: KDAConfig, hidden: int, norm_eps: float, init_std: float, kernels: KernelsConfig, *, rngs: nnx.Rngs
    ):
        self.cfg, self.norm_eps, self.kernels = cfg, norm_eps, kernels
        width, heads, rank = cfg.width, cfg.num_heads, cfg.head_dim
        conv = (cfg.conv_size, width)
        self.q_proj = matrix(rngs, (hidden, width), init_std, ("embed", "heads"), heads=heads)
        self.k_proj = matrix(rngs, (hidden, width), init_std, ("embed", "heads"), heads=heads)
        self.v_proj = matrix(rngs, (hidden, width), init_std, ("embed", "heads"), heads=heads)
        self.q_conv = param(rngs, conv, init_conv, ("taps", "heads"), fp32=True)
        self.k_conv = param(rngs, conv, init_conv, ("taps", "heads"), fp32=True)
        self.v_conv = param(rngs, conv, init_conv, ("taps", "heads"), fp32=True)
        self.f_a_proj = matrix(rngs, (hidden, rank), init_std, ("embed", "gate_rank"))
        self.f_b_proj = matrix(rngs, (rank, width), init_std, ("gate_rank", "heads"))
        self.dt_bias = param(rngs, (width,), init_dt_bias, ("heads",), fp32=True)
        self.a_log = param(rngs, (heads,), zeros if cfg.gate == "bounded" else init_a_log, (None,), fp32=True)
        self.b_proj = matrix(rngs, (hidden, heads), init_std, ("embed", None))
        if cfg.output_gate == "full":
            self.g_proj = matrix(rngs, (hidden, width), init_std, ("embed", "heads"))
        else:
            self.g_a_proj = matrix(rngs, (hidden, rank), init_std, ("embed", "gate_rank"))
            self.g_b_proj = matrix(rngs, (rank, width), init_std, ("gate_rank", "heads"))
        self.o_norm = param(rngs, (rank,), ones, (None,), fp32=True)
        self.o_proj = matrix(rngs, (width, hidden), init_std, ("heads", "embed"))

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Mixes packed rows.

        Args:
          x: [B, T, D] normed hidden states in compute dtype.
          segment_ids: [B, T] int32, documents of a row counted from 1, 0 for padding; None for one document a row.

        Returns:
          y [B, T, D] in x's dtype, and float32 scalars over the valid tokens: ``decay_mean``, ``decay_min`` (of the
          factors exp g), ``beta_mean``, and ``state_rms`` (root mean square of the rows' last states).
        """
        q, k, v = (heads(_linear(x, w)) for w in (self.q_proj, self.k_proj, self.v_proj))
        raw, strength = self._decay(x)
        y, state, g, beta = self._on_the_mesh((q, k, v), raw, strength, segment_ids)
        return self._output(y, x), _stats(g, beta, state, segment_ids)

    def init_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> KDACache:
        """Cache of ``batch`` rows before their first token, for computing in ``dtype``; any ``capacity`` fits."""
        cfg = self.cfg
        state = jnp.zeros((batch, cfg.num_heads, cfg.head_dim, cfg.head_dim), wide_dtype(dtype))
        return KDACache(state, jnp.zeros((batch, cfg.conv_size - 1, 3 * cfg.width), dtype))

    def extend(self, x: jax.Array, valid: jax.Array, cache: KDACache) -> tuple[jax.Array, KDACache]:
        """Mixes T more tokens of each row's one document: a prompt, or one decoded token.

        Args:
          x: [B, T, D].
          valid: [B, T] bool; invalid tokens come last in a row and change nothing.
          cache: of the tokens before.

        Returns:
          y [B, T, D], arbitrary at invalid tokens, and the cache after the valid ones.
        """
        implementation = "recurrent" if x.shape[1] == 1 else self.kernels.kda
        inputs = [_linear(x, w) for w in (self.q_proj, self.k_proj, self.v_proj)]
        taps = jnp.split(cache.taps, 3, axis=-1)
        o, state, _, _ = self._mix(
            inputs, *self._decay(x), self._weights(), valid.astype(jnp.int32), taps, cache.state, implementation
        )
        lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
        return self._output(o, x), KDACache(state, next_taps(jnp.concatenate(inputs, axis=-1), cache.taps, lengths))

    def _decay(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Wide inputs of the log-decay [B, T, HK] and of beta [B, T, H]."""
        return _linear(_linear(x, self.f_a_proj), self.f_b_proj, to_wide=True), _linear(x, self.b_proj, to_wide=True)

    def _weights(self) -> Weights:
        return Weights((self.q_conv[...], self.k_conv[...], self.v_conv[...]), self.a_log[...], self.dt_bias[...])

    def _mix(
        self,
        inputs: Sequence[jax.Array],
        raw: jax.Array,
        strength: jax.Array,
        weights: Weights,
        segment_ids: jax.Array | None,
        taps: Sequence[jax.Array | None],
        state: jax.Array | None,
        implementation: Implementation,
        axis: str | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Convolutions, decay and delta rule of some heads: o [B, T, H, K], last state, g [B, T, H, K], beta.

        Args:
          inputs: of the q, k and v convolutions, each [B, T, HK].
          raw, strength: of :meth:`_decay`.
          weights: of these heads.
          segment_ids: [B, T].
          taps: of the convolutions, each [B, W-1, HK] or None.
          state: before the first token.
          implementation: of the delta rule.
          axis: mesh axis that shares out the tokens.
        """
        cfg = self.cfg
        per_head = lambda a: a.reshape(*a.shape[:2], -1, cfg.head_dim)  # noqa: E731
        q, k, v = (
            per_head(causal_conv(x, w, segment_ids=segment_ids, taps=before))
            for x, w, before in zip(inputs, weights.convs, taps, strict=True)
        )
        bound, gate = cfg.gate_lower_bound if cfg.gate == "bounded" else None, per_head(raw)
        o, state = kda_from_raw(
            q,
            k,
            v,
            gate,
            strength,
            weights.a_log,
            weights.dt_bias,
            lower_bound=bound,
            segment_ids=segment_ids,
            initial_state=state,
            chunk=self.kernels.kda_chunk,
            implementation=implementation,
            axis=axis,
        )
        # For the statistics alone; where the delta rule formed them too, XLA does so once.
        return o, state, kda_gate(gate, weights.a_log, weights.dt_bias, bound), jax.nn.sigmoid(strength)

    def _on_the_mesh(
        self, inputs: Sequence[jax.Array], raw: jax.Array, strength: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """:meth:`_mix` with rows, heads and tokens of a row shared out over the mesh."""
        rows, tokens, width = split(strength.shape, (ROWS, "context", "tensor"))
        axis = None if tokens is None else "context"
        if segment_ids is None:
            segment_ids = jnp.ones(strength.shape[:2], jnp.int32)

        def own(inputs, raw, strength, weights, segment_ids):
            taps = [None] * 3 if axis is None else _halo(inputs, segment_ids, self.cfg.conv_size - 1, axis)
            out = self._mix(inputs, raw, strength, weights, segment_ids, taps, None, self.kernels.kda, axis)
            o, state, g, beta = out
            return o, state[None], g, beta

        here, by_head = P(rows, tokens, width), P(rows, tokens, width, None)
        weights = Weights((P(None, width),) * 3, P(width), P(width))
        o, state, g, beta = on_each_device(
            own,
            (tuple(inputs), raw, strength, self._weights(), segment_ids),
            (here, here, here, weights, P(rows, tokens)),
            (by_head, P(tokens, rows, width), by_head, here),
        )
        return o, state[-1], g, beta

    def _output(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """Gated norm of the heads' outputs o [B, T, H, K], and the way back to [B, T, D]."""
        gate = self._output_gate(x)
        gate = gate.reshape(*gate.shape[:2], self.cfg.num_heads, -1)
        o = gated_norm(o, self.o_norm[...], gate, self.norm_eps).astype(x.dtype)
        return _linear(o.reshape(*o.shape[:2], -1), self.o_proj)

    def _output_gate(self, x: jax.Array) -> jax.Array:
        """Gate before its sigmoid, [B, T, HK]."""
        if self.cfg.output_gate == "full":
            return _linear(x, self.g_proj)
        return _linear(_linear(x, self.g_a_proj), self.g_b_proj)


def _halo(inputs: Sequence[jax.Array], segment_ids: jax.Array, size: int, axis: str) -> list[jax.Array]:
    """The ``size`` inputs before this device's tokens, where they belong to the document of its first one."""
    ids = from_left(segment_ids[:, -size:], axis)
    same = (ids == segment_ids[:, :1])[..., None]
    return [jnp.where(same, from_left(x[:, -size:], axis), 0) for x in inputs]


def init_conv(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Convolution taps [W, C], uniform within +-W^-0.5: each output has about a third of an input's variance."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def init_dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse softplus of a step drawn log-uniformly from [1e-3, 1e-1] (k3-facts 2.2)."""
    low, high = np.log(1e-3), np.log(1e-1)
    step = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high)), 1e-4)
    return step + jnp.log(-jnp.expm1(-step))


def init_a_log(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Logarithm of a rate drawn uniformly from [1, 16] (k3-facts 2.2, softplus form)."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _linear(x: jax.Array, w: nnx.Param, to_wide: bool = False) -> jax.Array:
    """``x @ w`` in x's dtype, or rounded no further than the wide accumulator."""
    dtype = wide_dtype(x.dtype) if to_wide else x.dtype
    return jnp.matmul(x, w[...].astype(x.dtype), preferred_element_type=dtype)


def gated_norm(o: jax.Array, weight: jax.Array, gate: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of each head's output, then the sigmoid gate; o and gate [B, T, H, K], weight [K]; wide."""
    o = wide(o)
    o = o * lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + eps) * wide(weight)[None, None, None]
    return o * jax.nn.sigmoid(wide(gate))


def _stats(g: jax.Array, beta: jax.Array, state: jax.Array, segment_ids: jax.Array | None) -> dict[str, jax.Array]:
    """What ``metrics`` shows of the decay, beta and the last states; carries no gradient."""
    g, beta, state = (lax.stop_gradient(a).astype(jnp.float32) for a in (g, beta, state))
    decay = jnp.exp(g)
    valid = (
        jnp.ones(beta.shape, bool) if segment_ids is None else jnp.broadcast_to(segment_ids[..., None] > 0, beta.shape)
    )
    count = jnp.maximum(jnp.sum(valid), 1).astype(jnp.float32)
    mask = valid[..., None]  # [B, T, H, 1]
    return {
        "decay_mean": jnp.sum(jnp.where(mask, decay, 0)) / (count * decay.shape[-1]),
        "decay_min": jnp.min(jnp.where(mask, decay, 1)),
        "beta_mean": jnp.sum(jnp.where(valid, beta, 0)) / count,
        "state_rms": jnp.sqrt(jnp.mean(jnp.square(state))),
    }
