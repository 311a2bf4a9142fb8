"""Causal softmax attention over packed documents: the typed entry of the op.

Letters in shape comments: B rows, T tokens, H heads, Q key width, R width of the keys' shared part, V value width.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from k3train.config.errors import UserError
from k3train.kernels.attention import blockwise, reference, stretches

Implementation = Literal["auto", "mosaic_gpu", "blockwise", "reference"]


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    shared: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    implementation: Implementation = "auto",
    block: int = 512,
    places: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention in which a token sees itself and earlier tokens of its own document (k3-facts 3).

    Args:
      q: [B, T, H, Q] queries.
      k: [B, T, H, Q] keys, of the dtype of ``q``.
      v: [B, T, H, V] values; V may differ from Q.
      scale: factor on the scores before the softmax.
      shared: [B, T, R] the last R channels of the keys where all heads have them in common; k then has Q - R.
      segment_ids: [B, T] int, documents of a row numbered from 1, 0 for padding; one document if absent.
      implementation: ``auto`` is ``blockwise``; ``mosaic_gpu`` are kernels for Hopper GPUs, for keys of 128 + 64
        channels, values of 128, bfloat16, and a positive scale (``mosaic_gpu/entry.py``).
      block: query rows scored at a time (blockwise).
      places: [n] int32: the queries are not those of the keys but n equal stretches of the row that begin there
        (context parallelism); k, v and segment_ids are the whole row's, [B, S, ...].

    Returns:
      (o, max_logit): o [B, T, H, V] wide (float32, or float64 for float64 inputs), zero on padding;
      max_logit [H] wide, the greatest scaled score over the pairs that may attend, 0 where there is no
      such pair. No gradient flows through max_logit.

    Raises:
      ValueError: where keys are not as many as queries, or stretches not equal.
      UserError: where ``mosaic_gpu`` is asked for what it does not take.
    """
    if implementation == "mosaic_gpu":
        if places is not None:
            raise UserError(
                "kernels.attention: mosaic_gpu does not share out a row (mesh.context); kernels.attention: auto does"
            )
        _same_tokens(q, k, v)
        if segment_ids is None:
            segment_ids = jnp.ones(q.shape[:2], jnp.int32)
        from k3train.kernels.attention.mosaic_gpu.entry import mosaic_gpu

        return mosaic_gpu(q, k, shared, v, segment_ids, scale)
    if shared is not None:
        k = jnp.concatenate([k, jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], shared.shape[-1]))], axis=-1)
    if places is not None:
        return _of_stretches(q, k, v, scale, segment_ids, implementation, block, places)
    _same_tokens(q, k, v)
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    match implementation:
        case "reference":
            return reference.attention(q, k, v, segment_ids, scale)
        case "auto" | "blockwise":
            return blockwise.attention(q, k, v, segment_ids, scale, block)


def _same_tokens(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if k.shape[:3] != q.shape[:3] or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"attention needs as many keys as queries, got {q.shape}, {k.shape}, {v.shape}")


def _of_stretches(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    segment_ids: jax.Array | None,
    implementation: str,
    block: int,
    places: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """:func:`attention` of some stretches of a row; the reference scores all queries and picks theirs."""
    if q.shape[1] % places.shape[0] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{q.shape[1]} queries are not {places.shape[0]} equal stretches of {k.shape}, {v.shape}")
    if segment_ids is None:
        segment_ids = jnp.ones(k.shape[:2], jnp.int32)
    if implementation != "reference":
        return stretches.attention(q, k, v, segment_ids, places, scale, block)
    length = q.shape[1] // places.shape[0]
    place = (places[:, None] + jnp.arange(length, dtype=jnp.int32)[None]).reshape(-1)  # [n L]
    return reference.attention(q, k, v, segment_ids, scale, place)
