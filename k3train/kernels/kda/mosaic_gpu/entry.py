"""The delta rule on Hopper: the typed entries to the Mosaic GPU kernels, and their place in automatic differentiation.

Kernels take head width 128, bfloat16 tokens and 64-token chunks; rows of any length are padded to whole chunks here.
Forward saves its inputs and nothing else. Nothing sums in an order that may change, so the same inputs give the same
bits.
"""

from functools import partial

import jax
import jax.numpy as jnp

from k3train.config.errors import UserError
from k3train.kernels.kda.mosaic_gpu import packing, passes
from k3train.kernels.kda.mosaic_gpu.intra import Raw
from k3train.kernels.kda.mosaic_gpu.parts import CHUNK, LOG2E, WIDTH, Form


def mosaic_gpu(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    raw_gate: jax.Array,
    beta_logits: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    *,
    starts: jax.Array | None = None,
    valid: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    scale: float | None = None,
    lower_bound: float | None = -5.0,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule from raw projections: unit q and k, gate, beta's sigmoid and the decay are formed in the kernels.

    Same maths as ``kda(l2_normalize(q), l2_normalize(k), v, kda_gate(raw_gate, a_log, dt_bias, lower_bound),
    sigmoid(beta_logits))`` (k3-facts 2.1), differentiable once in every array of numbers.

    Args:
      q, k, v, raw_gate: [B, T, H, 128] bfloat16.
      beta_logits: [B, T, H].
      a_log: [H].
      dt_bias: [H*128], head major.
      starts: [B, T] bool, the tokens at which the state restarts (``api.document_starts``); None for nowhere.
      valid: [B, T] bool, tokens that are no padding; None for all.
      initial_state: [B, H, 128, 128] before the row's first document; None for zeros.
      scale: of q; 128^-0.5 where None.
      lower_bound: of the bounded gate, or None for the softplus gate.

    Returns:
      o [B, T, H, 128] bfloat16, 0 at padding, and the float32 state [B, H, 128, 128] after the last valid token.

    Raises:
      UserError: where a width is not 128 or a dtype not bfloat16.
    """
    form = Form(
        "softplus" if lower_bound is None else "bounded",
        0.0 if lower_bound is None else float(lower_bound),
        True,
        WIDTH**-0.5 if scale is None else float(scale),
    )
    beta = jax.nn.sigmoid(beta_logits.astype(jnp.float32))
    rate, bias = a_log.astype(jnp.float32), dt_bias.astype(jnp.float32).reshape(-1, WIDTH)
    return _padded(form, q, k, v, raw_gate, beta, rate, bias, starts, valid, initial_state)


def mosaic_gpu_core(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    starts: jax.Array | None = None,
    valid: jax.Array | None = None,
    initial_state: jax.Array | None = None,
    scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The delta rule from unit keys and log-decays, as ``chunked`` and ``recurrent`` take them.

    Args:
      q, k, v: [B, T, H, 128] bfloat16, k of at most unit length.
      g: [B, T, H, 128] float32 log-decay, finite and at most 0 (a restart is told by ``starts``, not by -inf).
      beta: [B, T, H] in [0, 1].
      starts, valid, initial_state: as in :func:`mosaic_gpu`.
      scale: of q.

    Returns and raises as :func:`mosaic_gpu`.
    """
    heads = q.shape[2]
    form = Form("given", 0.0, False, float(scale))
    nothing = jnp.zeros((heads,), jnp.float32), jnp.zeros((heads, WIDTH), jnp.float32)
    g, beta = g.astype(jnp.float32), beta.astype(jnp.float32)
    return _padded(form, q, k, v, g, beta, *nothing, starts, valid, initial_state)


def _padded(form, q, k, v, gate, beta, a_log, bias, starts, valid, state):
    """Check, fill rows up to whole chunks, run."""
    for name, x in (("q", q), ("k", k), ("v", v), ("gate", gate)):
        if x.shape[-1] != WIDTH or (x.dtype != jnp.bfloat16 and not (name == "gate" and form.gate == "given")):
            raise UserError(
                f"kernels.kda mosaic_gpu: {name} is {x.dtype} of width {x.shape[-1]}; these kernels take bfloat16 of "
                f"width {WIDTH}, kernels.kda: chunked takes anything"
            )
    batch, tokens, heads, _ = q.shape
    starts = jnp.zeros((batch, tokens), bool) if starts is None else starts
    valid = jnp.ones((batch, tokens), bool) if valid is None else valid
    if state is None:
        state = jnp.zeros((batch, heads, WIDTH, WIDTH), jnp.float32)
    fill = lambda x: jnp.pad(x, [(0, 0), (0, -tokens % CHUNK)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    q, k, v, gate, beta, starts, valid = (fill(x) for x in (q, k, v, gate, beta, starts, valid))
    beta = jnp.where(valid[..., None], beta, 0)
    if form.gate == "given":
        gate = jnp.where(valid[..., None, None], gate, 0)
    codes = packing.codes(starts, valid)
    o, end = _delta_rule(form, q, k, v, gate, beta, a_log, bias, state.astype(jnp.float32), codes)
    return o[:, :tokens], end


def _raw(form: Form, q, k, v, gate, beta, a_log, bias, codes) -> Raw:
    """The arguments as the kernels load them."""
    rest = None
    if form.gate == "given":
        gate = gate * LOG2E
        high = gate.astype(jnp.bfloat16)
        gate, rest = high, (gate - high.astype(jnp.float32)).astype(jnp.bfloat16)
    rate = jnp.broadcast_to(jnp.exp(a_log)[:, None], bias.shape)
    return Raw(q, k, v, gate, rest, jnp.moveaxis(beta, 1, 2), codes, rate, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_rule(form, q, k, v, gate, beta, a_log, bias, state, codes):
    return passes.forward(form, _raw(form, q, k, v, gate, beta, a_log, bias, codes), state)


def _delta_rule_fwd(form, q, k, v, gate, beta, a_log, bias, state, codes):
    arguments = (q, k, v, gate, beta, a_log, bias, state, codes)
    return _delta_rule(form, *arguments), arguments


def _delta_rule_bwd(form, arguments, cotangents):
    q, k, v, gate, beta, a_log, bias, state, codes = arguments
    d_o, d_state = cotangents
    raw = _raw(form, q, k, v, gate, beta, a_log, bias, codes)
    found, d_start = passes.backward(form, raw, state, d_o.astype(jnp.bfloat16), d_state.astype(jnp.float32))
    d_a_log, d_bias = jnp.zeros_like(a_log), jnp.zeros_like(bias)
    if form.gate != "given":
        d_a_log, d_bias = _parameters(form, gate, found.gate, bias)
    return found.q, found.k, found.v, found.gate, jnp.moveaxis(found.beta, 1, 2), d_a_log, d_bias, d_start, None


def _parameters(form: Form, gate: jax.Array, d_gate: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of A_log [H] and dt_bias [H, 128], from the raw gate's, in one pass over both."""
    z, d_z = gate.astype(jnp.float32) + bias[None, None], d_gate.astype(jnp.float32)
    if form.gate == "bounded":
        d_rate = d_z * z
    else:  # softplus(z) / sigmoid(z), which goes to 1
        d_rate = d_z * jnp.where(z < -15, 1.0, jax.nn.softplus(z) * (1.0 + jnp.exp(-jnp.maximum(z, -15.0))))
    d_bias, d_rate = jnp.sum(d_z, axis=(0, 1)), jnp.sum(d_rate, axis=(0, 1))
    return jnp.sum(d_rate, axis=-1), d_bias


_delta_rule.defvjp(_delta_rule_fwd, _delta_rule_bwd)
