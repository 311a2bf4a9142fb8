"""The delta rule by chunks (k3-facts 2.3) with its backward pass by hand (2.4), exact for any decay from 0 to 1.

Notation of the facts: inside a chunk E_ij is the decay from token j to token i, A_ij = beta_i k_i E_ij k_j for i > j,
X = (I + A)^-1, P_ij = q_i E_ij k_j for i >= j. A chunk that starts with state S writes D = X (beta v - beta e^G k S),
reads o = e^G q S + P D and ends with e^G_C S + (e^(G_C - G) k)^T D; the decays e^G and e^(G_C - G) since the chunk's
start and until its end are ``head`` and ``tail`` here.

N chunks, B rows, H heads, C tokens of a chunk, K/V key/value width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3train.kernels.kda import context, pairs
from k3train.kernels.kda.reference import decay_factors
from k3train.kernels.kda.triangular import unit_lower_inverse


class Saved(NamedTuple):
    """What the backward pass takes from the forward one: the inputs in chunks, and what is small, dear or sequential.

    Decays between tokens are formed again. Under ``jax.checkpoint`` the inputs alone are kept.
    """

    rows: jax.Array
    """q and beta k, [N, B, H, 2, C, K]."""
    k: jax.Array
    v: jax.Array
    decay: jax.Array
    beta: jax.Array
    """[N, B, H, C, .], beta with one column."""
    scores: jax.Array
    """P [N, B, H, C, C]."""
    inverse: jax.Array
    """X [N, B, H, C, C]."""
    w: jax.Array
    """X beta e^G k, [N, B, H, C, K]."""
    written: jax.Array
    """D, [N, B, H, C, V]."""
    starts: jax.Array
    """S, [N, B, H, K, V]."""
    transition: jax.Array | None
    """M of a shard (``context.py``), [B, H, K, K]; None where a device has whole rows."""


@partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    precision: lax.PrecisionLike,
    chunk: int,
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Same arguments and results as :func:`k3train.kernels.kda.reference.recurrent`, and ``chunk``, a power of two.

    Work inside chunks is batched over all of them; two products of a chunk, [C, K] with [K, V], are sequential.
    With ``axis``, a mesh axis inside ``shard_map``, tokens are a shard of the row; ``state`` is then the state before
    the row on every device, and the second result the state after this device's shard.
    """
    return _forward(q, k, v, g, beta, state, precision, chunk, axis)[0]


def _forward(q, k, v, g, beta, state, precision, chunk, axis):
    matmul = partial(jnp.matmul, precision=precision)
    tokens = q.shape[1]
    chunk = min(chunk, 1 << (tokens - 1).bit_length())
    q, k, v, beta = (_cut(x, chunk, 0) for x in (q, k, v, beta[..., None]))
    decay = _cut(decay_factors(g), chunk, 1)  # past the end beta 0 and decay 1 leave the state as it is
    rows = jnp.stack([q, beta * k], axis=-3)
    stages, head, tail = pairs.stages_of(decay)
    scores, inverse = _pairs(rows, k, stages, precision)
    w, u = matmul(inverse, rows[..., 1, :, :] * head), matmul(inverse, beta * v)

    def step(state, chunk):
        w, u, keys, whole = chunk
        written = u - matmul(w, state)
        return whole[..., None] * state + _tn(keys, written, precision), (state, written)

    chunks = (w, u, k * tail, head[..., -1, :])
    moves = None
    if axis is not None:
        moves = context.transition(w, chunks[2], chunks[3], precision)
        own, _ = lax.scan(step, jnp.zeros_like(state), chunks)
        state = context.start_of_shard(state, moves, own, axis, precision)
    state, (starts, written) = lax.scan(step, state, chunks)
    o = matmul(q * head, starts) + matmul(scores, written)
    return (_uncut(o, tokens), state), Saved(rows, k, v, decay, beta, scores, inverse, w, written, starts, moves)


def _pairs(rows: jax.Array, k: jax.Array, stages: list[pairs.Stage], precision: lax.PrecisionLike):
    """P and X, [N, B, H, C, C]."""
    scores = jnp.sum(rows[..., 0, :, :] * k, axis=-1)[..., None, None]  # blocks of one token
    inverse = jnp.ones_like(scores)
    for stage in stages:
        both = pairs.products(rows, k, stage, precision)  # [N, B, H, n, 2, rb, rb]
        scores = pairs.place(scores, both[..., 0, :, :])
        inverse = unit_lower_inverse(both[..., 1, :, :], inverse, precision)
    return lax.optimization_barrier((scores[..., 0, :, :], inverse[..., 0, :, :]))


def _backward(precision, chunk, axis, saved: Saved, cotangents):
    rows, k, v, decay, beta, scores, inverse, w, written, starts, moves = saved
    tn, nt = partial(_tn, precision=precision), partial(_nt, precision=precision)
    q = rows[..., 0, :, :]
    tokens = cotangents[0].shape[1]
    do, d_state = _cut(cotangents[0], k.shape[-2], 0), cotangents[1]
    stages, head, tail = pairs.stages_of(decay)
    whole = head[..., -1, :]

    def step(d_state, chunk):
        d_written, d_start, keys, w, whole = chunk
        d_written = d_written + jnp.matmul(keys, d_state, precision=precision)
        return whole[..., None] * d_state + d_start - tn(w, d_written), (d_state, d_written)

    xs = (tn(scores, do), tn(q * head, do), k * tail, w, whole)
    if moves is not None:
        own, _ = lax.scan(step, d_state, xs, reverse=True)
        d_state = d_state + context.end_of_shard(moves, own, axis, precision)
    d_start, (d_ends, d_written) = lax.scan(step, d_state, xs, reverse=True)
    if moves is not None:  # the row's state enters the first shard only
        d_start = jnp.where(lax.axis_index(axis) == 0, d_start, 0)

    d_right = tn(inverse, d_written)  # of beta v - beta e^G k S
    outer = jnp.concatenate([do, -d_right], axis=-2)  # times D^T: gradient of (P, A); times S^T: of e^G (q, beta k)
    split = lambda x: x.reshape(*x.shape[:-2], 2, -1, x.shape[-1])  # noqa: E731
    d_pairs = split(nt(outer, written))[..., None, :, :, :]  # [N, B, H, 1, 2, C, C]
    d_rows = split(nt(outer, starts)) * head[..., None, :, :]
    d_k = nt(written, d_ends) * tail
    log_whole = whole * jnp.sum(starts * d_ends, axis=-1)  # [N, B, H, K]
    last = pairs.mask(np.arange(k.shape[-2])[:, None] == k.shape[-2] - 1, k.ndim)
    log_head = jnp.sum(rows * d_rows, axis=-3) + jnp.where(last, log_whole[..., None, :], 0)
    logs = pairs.Logs(log_head, k * d_k)
    for stage in reversed(stages):
        d_pairs = pairs.diagonal(d_pairs, stage.size)
        more_rows, more_k, logs = pairs.products_bwd(rows, k, d_pairs, stage, logs, precision)
        d_rows, d_k = d_rows + more_rows, d_k + more_k
    on_self = jnp.sum(do * written, axis=-1, keepdims=True)  # of P's diagonal, q_i k_i
    dq, d_beta_k = d_rows[..., 0, :, :] + on_self * k, d_rows[..., 1, :, :]
    d_k = d_k + on_self * q + beta * d_beta_k
    d_beta = jnp.sum(d_right * v, axis=-1) + jnp.sum(d_beta_k * k, axis=-1)
    dq, dk, dv, dg, d_beta = (_uncut(x, tokens) for x in (dq, d_k, beta * d_right, logs.head, d_beta[..., None]))
    return dq, dk, dv, dg, d_beta[..., 0], d_start


chunked.defvjp(_forward, _backward)


def _tn(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """x^T y."""
    return jnp.einsum("...ij,...ik->...jk", x, y, precision=precision)


def _nt(x: jax.Array, y: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """x y^T."""
    return jnp.einsum("...ik,...jk->...ij", x, y, precision=precision)


def _cut(x: jax.Array, chunk: int, fill: int) -> jax.Array:
    """[B, T, H, D] to [N, B, H, C, D], ``fill`` past the end."""
    batch, tokens, heads, width = x.shape
    x = jnp.pad(x, ((0, 0), (0, -tokens % chunk), (0, 0), (0, 0)), constant_values=fill)
    return jnp.transpose(x.reshape(batch, -1, chunk, heads, width), (1, 0, 3, 2, 4))


def _uncut(x: jax.Array, tokens: int) -> jax.Array:
    """The reverse of :func:`_cut`."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))  # [B, N, C, H, D]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]
