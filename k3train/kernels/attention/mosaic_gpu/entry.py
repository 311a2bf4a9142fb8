"""MLA's attention on Hopper: the typed entry to the Mosaic GPU kernels, and its place in automatic differentiation.

The kernels take the widths of K3 and bfloat16; rows of any length are padded to whole blocks here. Forward keeps its
inputs, the outputs and a log-sum a row. No array has two axes of tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from k3train.config.errors import UserError
from k3train.kernels.attention.mosaic_gpu import backward, forward
from k3train.kernels.attention.mosaic_gpu.bounds import BLOCK, bounds
from k3train.kernels.attention.mosaic_gpu.parts import LOG2E, MASKED, OWN, SHARED, VALUE, Operands


def mosaic_gpu(
    q: jax.Array,
    k: jax.Array,
    shared: jax.Array | None,
    v: jax.Array,
    segment_ids: jax.Array,
    scale: float,
    out_dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention inside documents, see :func:`k3train.kernels.attention.api.attention`.

    Args:
      q: [B, T, H, 192] bfloat16.
      k: [B, T, H, 128] bfloat16, the keys' part that meets the first 128 channels of q.
      shared: [B, T, 64] bfloat16, the part that meets the rest, the same for all heads.
      v: [B, T, H, 128] bfloat16.
      segment_ids: [B, T] int, 0 for padding.
      scale: on scores, positive.
      out_dtype: of o, float32 or bfloat16.

    Returns:
      o [B, T, H, 128], 0 at padding, and max_logit [H] float32, without gradient.

    Raises:
      UserError: where a width or a dtype is another, or the keys have no shared part.
      ValueError: where the scale is not positive.
    """
    if scale <= 0:
        raise ValueError(f"attention mosaic_gpu needs a positive scale, got {scale}")
    taken = {"q": (q, OWN + SHARED), "k": (k, OWN), "the keys' shared part": (shared, SHARED), "v": (v, VALUE)}
    for name, (x, width) in taken.items():
        if x is None or x.shape[-1] != width or x.dtype != jnp.bfloat16:
            has = "missing" if x is None else f"{x.dtype} of width {x.shape[-1]}"
            raise UserError(
                f"kernels.attention mosaic_gpu: {name} is {has}; these kernels take bfloat16 of width {width} there, "
                "kernels.attention: blockwise takes anything"
            )
    tokens = q.shape[1]
    fill = lambda x: jnp.pad(x, [(0, 0), (0, -tokens % BLOCK)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    filled = (fill(x) for x in (q, k, shared, v, segment_ids.astype(jnp.int32)))
    o, max_logit = _attention(float(scale), jnp.dtype(out_dtype), *filled)
    return o[:, :tokens], jax.lax.stop_gradient(max_logit)


def _operands(q, k, shared, v, segment_ids) -> Operands:
    return Operands(q, k, shared, v, jnp.where(segment_ids == 0, -1, segment_ids), segment_ids)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale, out_dtype, q, k, shared, v, segment_ids):
    return _attention_fwd(scale, out_dtype, q, k, shared, v, segment_ids)[0]


def _attention_fwd(scale, out_dtype, q, k, shared, v, segment_ids):
    given = _operands(q, k, shared, v, segment_ids)
    o, log_sum, top = forward.forward(given, bounds(segment_ids), scale, out_dtype)
    greatest = jnp.max(top, axis=(0, 2))
    max_logit = jnp.where(greatest > MASKED, greatest / LOG2E, 0.0)
    return (o, max_logit), (q, k, shared, v, segment_ids, o, log_sum)


def _attention_bwd(scale, out_dtype, saved, cotangents):
    q, k, shared, v, segment_ids, o, log_sum = saved
    do = cotangents[0].astype(jnp.bfloat16)  # max_logit carries no gradient
    # Of the rounded cotangent, as the kernels see it, so that a row's score gradients still sum to nothing.
    delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, H, T]
    given, found = _operands(q, k, shared, v, segment_ids), bounds(segment_ids)
    dq = backward.queries(given, found, do, log_sum, delta, scale)
    dk, d_shared, dv = backward.keys(given, found, do, log_sum, delta, scale)
    d_shared = jnp.sum(d_shared.astype(jnp.float32), axis=2).astype(d_shared.dtype)
    return dq, dk, d_shared, dv, None


_attention.defvjp(_attention_fwd, _attention_bwd)
