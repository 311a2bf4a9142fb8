"""Gated multi-head latent attention without positions (k3-facts 3).

Keys and values of all heads come from one latent vector a token; a second small vector is shared by all
heads as the rest of the key, neither normed nor rotated. Training expands the latents to keys and
values; :meth:`MLA.extend` keeps only latents in its cache and moves the two halves of ``kv_b_proj`` to
the other side of the attention (the absorbed form).

Letters in shape comments: B rows, T tokens, S cache capacity, D hidden, H heads, N nope key width,
R shared key width, V value width, L latent rank.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from k3train.kernels.attention.api import attention
from k3train.kernels.config import KernelsConfig
from k3train.kernels.numerics import wide, wide_dtype
from k3train.models.param import matrix
from k3train.models.parts.mla.config import MLAConfig
from k3train.models.parts.norm.layer import RMSNorm
from k3train.parallel.activations import ROWS, names, on_each_device, split
from k3train.parallel.neighbours import gather_tokens, stretches, swap_halves


class MLACache(NamedTuple):
    """What decoding remembers of a row: latents and shared keys of the tokens so far."""

    latent: jax.Array
    """[B, S, L] latents, normed."""
    shared: jax.Array
    """[B, S, R] shared part of the keys."""
    length: jax.Array
    """[B] int32 tokens held."""


class MLA(nnx.Module):
    """Gated MLA mixer; sizes and variants in :class:`MLAConfig`."""

    def __init__(self, cfg: MLAConfig, hidden: int, init_std: float, kernels: KernelsConfig, *, rngs: nnx.Rngs):
        self.cfg, self.kernels = cfg, kernels
        heads, query, eps = cfg.num_heads, cfg.num_heads * cfg.qk_head_dim, cfg.latent_norm_eps
        if cfg.q_lora_rank is None:
            self.q_proj = matrix(rngs, (hidden, query), init_std, ("embed", "heads"), heads=heads)
        else:
            self.q_a_proj = matrix(rngs, (hidden, cfg.q_lora_rank), init_std, ("embed", "q_lora"))
            self.q_a_norm = RMSNorm(cfg.q_lora_rank, eps, rngs=rngs, axes=("q_lora",))
            self.q_b_proj = matrix(rngs, (cfg.q_lora_rank, query), init_std, ("q_lora", "heads"), heads=heads)
        kv_a = cfg.kv_lora_rank + cfg.qk_shared_head_dim
        kv_b = heads * (cfg.qk_nope_head_dim + cfg.v_head_dim)
        self.kv_a_proj = matrix(rngs, (hidden, kv_a), init_std, ("embed", "kv_lora"))
        self.kv_a_norm = RMSNorm(cfg.kv_lora_rank, eps, rngs=rngs, axes=("kv_lora",))
        self.kv_b_proj = matrix(rngs, (cfg.kv_lora_rank, kv_b), init_std, ("kv_lora", "heads"), heads=heads)
        if cfg.output_gate:
            self.g_proj = matrix(rngs, (hidden, cfg.width), init_std, ("embed", "heads"))
        self.o_proj = matrix(rngs, (cfg.width, hidden), init_std, ("heads", "embed"))

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Attends within the documents of each row.

        Args:
          x: [B, T, D] normed hidden states.
          segment_ids: [B, T] int, documents numbered from 1, 0 for padding; one document if absent.

        Returns:
          (y [B, T, D] in the dtype of ``x``, {"max_logit": [H] float32 greatest scaled score, for QK-Clip}).
        """
        rows, tokens, width = split((*x.shape[:2], self.cfg.num_heads), (ROWS, "context", "tensor"))
        here, by_head = P(rows, tokens, None), P(rows, tokens, width, None)
        if segment_ids is None:
            segment_ids = jnp.ones(x.shape[:2], jnp.int32)
        swap = partial(swap_halves, axis="context")
        if tokens is not None:  # until the output, work is on rows of equal causal work
            x = on_each_device(swap, (x,), (here,), here)
        latent, shared = self._latents(x)

        def own(q, latent, shared, up, segment_ids):
            o, max_logit = self._attend(q, latent, shared, up, segment_ids, None if tokens is None else "context")
            return o, max_logit[None]

        o, max_logit = on_each_device(
            own,
            (self._queries(x), latent, shared, self.kv_b_proj[...], segment_ids),
            (by_head, here, here, P(None, width), P(rows, tokens)),
            (by_head, P(names(rows) + names(tokens), width)),
        )
        y = self._output(o, x)
        if tokens is not None:
            y = on_each_device(swap, (y,), (here,), here)
        return y, {"max_logit": jax.lax.stop_gradient(jnp.max(max_logit, axis=0)).astype(jnp.float32)}

    def _attend(
        self,
        q: jax.Array,
        latent: jax.Array,
        shared: jax.Array,
        up: jax.Array,
        segment_ids: jax.Array,
        axis: str | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention of some heads: o [B, T, H, V] wide and max_logit [H].

        With ``axis``, tokens are a device's with swapped halves (``parallel/neighbours.py``), but for ``segment_ids``;
        the latents of the whole row are gathered and expanded here.
        """
        cfg, places = self.cfg, None
        if axis is not None:
            places = stretches(q.shape[1], axis)
            latent, shared = gather_tokens(latent, axis), gather_tokens(shared, axis)
            segment_ids = jax.lax.all_gather(segment_ids, axis, axis=1, tiled=True)
        kv = latent @ up.astype(latent.dtype)  # [B, S, H (N + V)]
        kv = kv.reshape(*latent.shape[:2], q.shape[2], -1)
        k, v = jnp.split(kv, [cfg.qk_nope_head_dim], axis=-1)
        return attention(
            q,
            k,
            v,
            shared=shared,
            scale=cfg.qk_head_dim**-0.5,
            segment_ids=segment_ids,
            implementation=self.kernels.attention,
            block=self.kernels.attention_block,
            places=places,
        )

    def init_cache(self, batch: int, capacity: int, dtype: DTypeLike) -> MLACache:
        """An empty cache for ``batch`` rows of at most ``capacity`` tokens, in the compute dtype."""
        latent = jnp.zeros((batch, capacity, self.cfg.kv_lora_rank), dtype)
        shared = jnp.zeros((batch, capacity, self.cfg.qk_shared_head_dim), dtype)
        return MLACache(latent, shared, jnp.zeros(batch, jnp.int32))

    def extend(self, x: jax.Array, valid: jax.Array, cache: MLACache) -> tuple[jax.Array, MLACache]:
        """Continues rows by T tokens each, by the absorbed form.

        ``q_nope . (W_uk c) = (W_uk^T q_nope) . c`` and ``sum_s p_s W_uv c_s = W_uv sum_s p_s c_s``, so every
        head attends over the cached latents themselves. The caller sees to the capacity: tokens beyond it
        are not kept.

        Args:
          x: [B, T, D] normed hidden states of the new tokens.
          valid: [B, T] bool; invalid tokens come last in a row, change nothing and give unused outputs.
          cache: what came before.

        Returns:
          (y [B, T, D], the cache with the valid tokens added).
        """
        cfg, count = self.cfg, x.shape[1]
        rows = jnp.arange(x.shape[0])[:, None]
        place = cache.length[:, None] + jnp.arange(count, dtype=jnp.int32)[None]  # [B, T]
        latent, shared = self._latents(x)
        slot = jnp.where(valid, place, cache.latent.shape[1])  # beyond the end: dropped
        cache = MLACache(
            cache.latent.at[rows, slot].set(latent.astype(cache.latent.dtype), mode="drop"),
            cache.shared.at[rows, slot].set(shared.astype(cache.shared.dtype), mode="drop"),
            cache.length + jnp.sum(valid, axis=1, dtype=jnp.int32),
        )
        accumulate = wide_dtype(x.dtype)
        up = self.kv_b_proj[...].astype(x.dtype).reshape(cfg.kv_lora_rank, cfg.num_heads, -1)
        up_k, up_v = jnp.split(up, [cfg.qk_nope_head_dim], axis=-1)  # [L, H, N], [L, H, V]
        q_nope, q_shared = jnp.split(self._queries(x), [cfg.qk_nope_head_dim], axis=-1)
        # Rounded to the compute dtype once, like the keys of the expanded form.
        q_latent = jnp.einsum("bthn,lhn->bthl", q_nope, up_k)
        held_latent, held_shared = cache.latent.astype(x.dtype), cache.shared.astype(x.dtype)
        scores = jnp.einsum("bthl,bsl->bhts", q_latent, held_latent, preferred_element_type=accumulate)
        scores += jnp.einsum("bthr,bsr->bhts", q_shared, held_shared, preferred_element_type=accumulate)
        seen = jnp.arange(held_latent.shape[1], dtype=jnp.int32)[None, None] <= place[:, :, None]  # [B, T, S]
        p = jax.nn.softmax(jnp.where(seen[:, None], scores * cfg.qk_head_dim**-0.5, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhts,bsl->bthl", p.astype(x.dtype), held_latent)  # [B, T, H, L]
        o = jnp.einsum("bthl,lhv->bthv", mixed, up_v, preferred_element_type=accumulate)
        return self._output(o, x), cache

    def _queries(self, x: jax.Array) -> jax.Array:
        """[B, T, H, N + R], each head [nope | shared]."""
        if self.cfg.q_lora_rank is None:
            q = x @ self.q_proj[...].astype(x.dtype)
        else:
            q = self.q_a_norm(x @ self.q_a_proj[...].astype(x.dtype)) @ self.q_b_proj[...].astype(x.dtype)
        return q.reshape(*x.shape[:2], self.cfg.num_heads, self.cfg.qk_head_dim)

    def _latents(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normed latents [B, T, L] and shared keys [B, T, R]."""
        latent, shared = jnp.split(x @ self.kv_a_proj[...].astype(x.dtype), [self.cfg.kv_lora_rank], axis=-1)
        return self.kv_a_norm(latent), shared

    def _output(self, o: jax.Array, x: jax.Array) -> jax.Array:
        """Gates ``o`` [B, T, H, V], kept wide until here (k3-facts 3, training detail), and projects it."""
        o = o.reshape(*x.shape[:2], self.cfg.width)
        if self.cfg.output_gate:
            o = o * jax.nn.sigmoid(wide(x @ self.g_proj[...].astype(x.dtype)))
        return o.astype(x.dtype) @ self.o_proj[...].astype(x.dtype)
