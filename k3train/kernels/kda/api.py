"""Kimi Delta Attention over packed rows: the typed entry to its implementations (k3-facts 2).

B rows, T tokens, H heads, K/V key/value width.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from k3train.config.errors import UserError
from k3train.kernels.config import KDA_KERNEL_WIDTH, KDA_KERNELS
from k3train.kernels.kda.chunked import chunked
from k3train.kernels.kda.context import last_ids
from k3train.kernels.kda.gate import kda_gate, l2_normalize
from k3train.kernels.kda.reference import recurrent
from k3train.kernels.numerics import wide

Named = Literal["mosaic_gpu", "mosaic_tpu", "chunked", "recurrent"]
Implementation = Literal["auto"] | Named


def resolve(implementation: Implementation) -> Named:
    """What ``auto`` stands for here, where devices are not known: the chunked form, which runs on all of them."""
    return "chunked" if implementation == "auto" else implementation


def kda_from_raw(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_gate: jax.Array,
    beta_logits: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    *,
    lower_bound: float | None,
    segment_ids: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    chunk: int = 64,
    implementation: Implementation = "auto",
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """:func:`kda` of unit q and k, the log-decay of ``kda_gate`` and beta = sigmoid(beta_logits) (k3-facts 2.1).

    ``mosaic_gpu`` forms all of these in its kernels, from bfloat16 (the raw gate is rounded to it), and its o is
    bfloat16; the others form them here, wide, and their o is wide.

    Args:
      q, k, v: [B, T, H, K] after the convolutions.
      raw_gate: [B, T, H, K].
      beta_logits: [B, T, H].
      a_log: [H].
      dt_bias: [H*K], head major.
      lower_bound: least log-decay of the bounded gate; None for the softplus gate.
      segment_ids, initial_state, chunk, implementation, axis: as in :func:`kda`.

    Returns:
      o [B, T, H, K] and the wide state [B, H, K, K].

    Raises:
      UserError: as :func:`kda`.
    """
    if resolve(implementation) != "mosaic_gpu":
        g, beta = kda_gate(raw_gate, a_log, dt_bias, lower_bound), jax.nn.sigmoid(beta_logits)
        return kda(
            l2_normalize(q),
            l2_normalize(k),
            wide(v),  # so that o stays wide
            g,
            beta,
            segment_ids=segment_ids,
            initial_state=initial_state,
            chunk=chunk,
            implementation=implementation,
            axis=axis,
        )
    from k3train.kernels.kda.mosaic_gpu.entry import mosaic_gpu

    _refuse_axis("mosaic_gpu", axis)
    valid, starts = (None, None) if segment_ids is None else (segment_ids > 0, document_starts(segment_ids))
    rest = {"starts": starts, "valid": valid, "initial_state": initial_state, "lower_bound": lower_bound}
    return mosaic_gpu(q, k, v, raw_gate.astype(jnp.bfloat16), beta_logits, a_log, dt_bias, **rest)


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
    gradient of g does not survive bf16. A kernel (``mosaic_tpu``, ``mosaic_gpu``) works only on its own
    devices and for heads of width 128; ``kernels/resolve.py`` chooses by both.

    Args:
      q: [B, T, H, K].
      k: [B, T, H, K], of unit length or shorter.
      v: [B, T, H, V].
      g: [B, T, H, K] log-decay, <= 0, unbounded below.
      beta: [B, T, H] in [0, 1].
      segment_ids: [B, T] integers, documents of a row counted from 1, 0 for padding; None for one document a row.
      initial_state: [B, H, K, V] before the row's first document; None for zeros.
      scale: of q; K^-0.5 where None.
      chunk: tokens in a chunk of the chunked form, a power of two; a kernel's chunks have 64.
      implementation: which one.
      precision: of the matrix products.
      axis: inside ``shard_map``, the mesh axis over which a row's tokens are shared out in order; T is then a shard's,
        ``initial_state`` the same on every device (and so its gradient a sum over them). Not for the recurrent form.

    Returns:
      o [B, T, H, V] in v's dtype, and the wide state [B, H, K, V] after the last valid token (of the shard).

    Raises:
      UserError: where ``chunk`` is not a power of two, the form cannot share out a row, or a kernel does not serve the
        width or dtype.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise UserError(f"kernels.kda_chunk: {chunk} is not a power of two; 64 is the usual choice")
    named = resolve(implementation)
    if axis is not None and named == "recurrent":
        raise UserError(
            "kernels.kda: the recurrent form takes a row token by token; mesh.context needs the chunked one"
        )
    if initial_state is None:
        batch, _, heads, width = k.shape
        initial_state = jnp.zeros((batch, heads, width, v.shape[-1]), wide(v).dtype)
    if scale is None:
        scale = float(k.shape[-1] ** -0.5)
    g, beta, state = (wide(x) for x in (g, beta, initial_state))
    valid, starts = None, None
    if segment_ids is not None:
        valid = segment_ids > 0
        starts = document_starts(segment_ids, None if axis is None else last_ids(segment_ids, axis))
        beta = jnp.where(valid[..., None], beta, 0)
    if named in KDA_KERNELS:
        return _by_kernel(named, q, k, v, g, beta, state, valid, starts, scale, precision, axis)

    core = {"chunked": partial(chunked, chunk=chunk, axis=axis), "recurrent": recurrent}[named]
    dtype = v.dtype
    q, k, v = wide(q) * scale, wide(k), wide(v)
    if valid is None or starts is None:
        o, state = core(q, k, v, g, beta, state, precision)
        return o.astype(dtype), state
    valid = valid[..., None, None]  # [B, T, 1, 1]
    g = jnp.where(starts[..., None, None], -jnp.inf, jnp.where(valid, g, 0))
    o, state = core(q, k, v, g, beta, state, precision)
    return jnp.where(valid, o, 0).astype(dtype), state


def _by_kernel(named: Named, q, k, v, g, beta, state, valid, starts, scale, precision, axis):
    """:func:`kda` by a kernel; q, k and v keep their dtypes, and documents go in as one flag a token."""
    widths, dtypes = {q.shape[-1], v.shape[-1]}, {x.dtype.name for x in (q, k, v, g, beta, state)}
    if widths != {KDA_KERNEL_WIDTH}:
        raise UserError(
            f"kernels.kda: {named} serves keys and values of width {KDA_KERNEL_WIDTH}, not {q.shape[-1]} and "
            f"{v.shape[-1]}; set kernels.kda: chunked"
        )
    if "float64" in dtypes:
        raise UserError(f"kernels.kda: {named} computes in float32, not float64; set kernels.kda: chunked")
    if named == "mosaic_gpu":
        from k3train.kernels.kda.mosaic_gpu.entry import mosaic_gpu_core

        _refuse_axis(named, axis)
        return mosaic_gpu_core(q, k, v, g, beta, starts=starts, valid=valid, initial_state=state, scale=float(scale))
    from k3train.kernels.kda.mosaic_tpu.rule import mosaic_tpu as kernel

    if isinstance(scale, jax.Array):  # a kernel's own is a constant
        q, scale = wide(q) * scale, 1.0
    flags = jnp.ones(beta.shape[:2], jnp.float32)
    if valid is not None:
        flags = valid.astype(jnp.float32) + starts.astype(jnp.float32)
    return kernel(q, k, v, g, beta, state, flags, float(scale), precision, axis)


def _refuse_axis(named: Named, axis: str | None) -> None:
    if axis is not None:
        raise UserError(f"kernels.kda: {named} does not share out a row's tokens; mesh.context needs the chunked form")


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
