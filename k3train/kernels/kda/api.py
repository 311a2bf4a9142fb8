"""Kimi Delta Attention over packed rows: the typed entry to its implementations (k3-facts 2).

B rows, T tokens, H heads, K/V key/value width.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from k3train.config.errors import UserError
from k3train.kernels.kda.chunked import chunked
from k3train.kernels.kda.context import last_ids
from k3train.kernels.kda.reference import recurrent
from k3train.kernels.numerics import wide

Implementation = Literal["auto", "chunked", "recurrent"]


def resolve(implementation: Implementation) -> Literal["chunked", "recurrent"]:
    """What ``auto`` stands for: the chunked form, which runs on every device."""
    return "chunked" if implementation == "auto" else implementation


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    scale: float | None = None,
    chunk: int = 64,
    implementation: Implementation = "auto",
    precision: lax.PrecisionLike = lax.Precision.HIGHEST,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Per token: S <- diag(exp g) S; S <- S + beta k (v - S^T k)^T; o = scale S^T q (k3-facts 2.1).

    The state restarts where ``segment_ids`` change; a document may begin anywhere. Tokens of segment 0 are padding:
    they leave the state as it is and their output is zero. Differentiable once, in q, k, v, g, beta and initial_state;
    ``jax.checkpoint`` round a layer leaves only its inputs to keep. All arithmetic is wide, bf16 inputs included: the
    gradient of g does not survive bf16.

    Args:
      q: [B, T, H, K].
      k: [B, T, H, K], of unit length or shorter.
      v: [B, T, H, V].
      g: [B, T, H, K] log-decay, <= 0, unbounded below.
      beta: [B, T, H] in [0, 1].
      segment_ids: [B, T] integers, documents of a row counted from 1, 0 for padding; None for one document a row.
      initial_state: [B, H, K, V] before the row's first document; None for zeros.
      scale: of q; K^-0.5 where None.
      chunk: tokens in a chunk of the chunked form, a power of two.
      implementation: which one.
      precision: of the matrix products.
      axis: inside ``shard_map``, the mesh axis over which a row's tokens are shared out in order; T is then a shard's,
        ``initial_state`` the same on every device (and so its gradient a sum over them). The chunked form only.

    Returns:
      o [B, T, H, V] in v's dtype, and the wide state [B, H, K, V] after the last valid token (of the shard).

    Raises:
      UserError: where ``chunk`` is not a power of two, or the form cannot share out a row.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise UserError(f"kernels.kda_chunk: {chunk} is not a power of two; 64 is the usual choice")
    if initial_state is None:
        batch, _, heads, width = k.shape
        initial_state = jnp.zeros((batch, heads, width, v.shape[-1]), wide(v).dtype)
    core = {"chunked": partial(chunked, chunk=chunk, axis=axis), "recurrent": recurrent}[resolve(implementation)]
    if axis is not None and core is recurrent:
        raise UserError(
            "kernels.kda: the recurrent form takes a row token by token; mesh.context needs the chunked one"
        )

    dtype = v.dtype
    q, k, v, g, beta, state = (wide(x) for x in (q, k, v, g, beta, initial_state))
    q = q * (k.shape[-1] ** -0.5 if scale is None else scale)
    if segment_ids is None:
        o, state = core(q, k, v, g, beta, state, precision)
        return o.astype(dtype), state
    valid = (segment_ids > 0)[..., None]  # [B, T, 1]
    before = None if axis is None else last_ids(segment_ids, axis)
    starts = document_starts(segment_ids, before)[..., None, None]
    beta = jnp.where(valid, beta, 0)
    g = jnp.where(starts, -jnp.inf, jnp.where(valid[..., None], g, 0))
    o, state = core(q, k, v, g, beta, state, precision)
    return jnp.where(valid[..., None], o, 0).astype(dtype), state


def document_starts(segment_ids: jax.Array, before: jax.Array | None = None) -> jax.Array:
    """[B, T] bool: the valid tokens at which the state restarts, i.e. not those of a row's first document.

    Padding between two documents, or inside one, makes no difference.

    Args:
      segment_ids: [B, T], 0 for padding.
      before: [B] document of the last valid token before these, 0 where there is none.
    """
    position = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    latest = lax.cummax(jnp.where(segment_ids > 0, position, -1), axis=1)
    latest = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)  # last valid token before t
    last = jnp.take_along_axis(segment_ids, jnp.maximum(latest, 0), axis=1)
    last = jnp.where(latest >= 0, last, 0 if before is None else before[:, None])
    return (segment_ids > 0) & (last > 0) & (last != segment_ids)
