"""What the kernels do in one grid step: one chunk of one head of one row (k3-facts 2.3, 2.4; ``chunked.py``).

The state is kept transposed, [V, K], so that the decay of its key channels lies along lanes. Arithmetic is float32.
A token's flag says where documents are: 0 for padding, 1, or 2 where the state restarts. A restart is a decay of 0,
which cuts pairs, what comes in and what goes out alike; padding has decay 1 and beta 0, and its inputs are not read.

C tokens of a chunk, K/V key/value width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from k3train.kernels.kda.mosaic_tpu import pairs
from k3train.kernels.kda.mosaic_tpu.pairs import CHUNK, NN, NT, TN, dot

Ref = Any
RESTART = 2


class Inputs(NamedTuple):
    """A chunk as a kernel finds it."""

    scale: Ref
    """[1, 1] of q."""
    flags: Ref
    """[1, C] float32."""
    beta: Ref
    """[1, C] float32, 0 at padding."""
    q: Ref
    k: Ref
    v: Ref
    g: Ref
    """[C, K], v [C, V]."""


class Chunk(NamedTuple):
    """A chunk in registers, with what follows from it alone."""

    valid: jax.Array
    """[C, K] of truth values."""
    q: jax.Array
    """Scaled."""
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    """[C, 1]."""
    bk: jax.Array
    """beta k."""
    decays: pairs.Decays
    scores: jax.Array
    """P [C, C]."""
    inverse: jax.Array
    """X = (I + A)^-1 [C, C]."""


def forward(*refs: Ref, precision: lax.PrecisionLike, save: bool) -> None:
    """Outputs of a chunk, and the state over the row's chunks.

    Args:
      refs: of :class:`Inputs`; the row's first state [V, K]; o [C, V]; the row's last state; with ``save`` the state
        this chunk starts with; the state carried over chunks.
      precision: of products.
      save: whether chunk-start states are written, for the backward pass.
    """
    inputs, (first, o, last, *starts, carried) = Inputs(*refs[:7]), refs[7:]
    _begin(carried, first[...])
    state, chunk = carried[...], _read(inputs, precision)
    if save:
        starts[0][...] = state
    decayed = jnp.concatenate([chunk.q, chunk.bk]) * jnp.concatenate([chunk.decays.start] * 2)
    read = dot(decayed, state, NT, precision)  # [2C, V]
    written = dot(chunk.inverse, chunk.beta * chunk.v - read[CHUNK:], NN, precision)
    out = read[:CHUNK] + dot(chunk.scores, written, NN, precision)
    o[...] = jnp.where(chunk.valid, out, 0.0).astype(o.dtype)
    carried[...] = _moved(chunk, state, written, precision)
    _finish(last, carried)


def forward_summary(*refs: Ref, precision: lax.PrecisionLike) -> None:
    """How a shard takes the state, S_end = M S_start + B: both carried through its chunks side by side.

    Args:
      refs: of :class:`Inputs`; both transposed, [V + K, K], B first; the same carried over chunks.
      precision: of products.
    """
    inputs, (last, carried) = Inputs(*refs[:7]), refs[7:]
    own = inputs.v.shape[-1]
    shape = last.shape
    _begin(carried, jnp.where(pairs.index(shape, 0) == pairs.index(shape, 1) + own, 1.0, 0.0))
    state, chunk = carried[...], _read(inputs, precision)
    values = chunk.beta * chunk.v
    values = jnp.concatenate([values, jnp.zeros((CHUNK, shape[0] - own), jnp.float32)], axis=1)
    read = dot(chunk.bk * chunk.decays.start, state, NT, precision)  # [C, V + K]
    written = dot(chunk.inverse, values - read, NN, precision)
    carried[...] = _moved(chunk, state, written, precision)
    _finish(last, carried)


def backward(*refs: Ref, precision: lax.PrecisionLike) -> None:
    """All gradients of a chunk, the last one first.

    Args:
      refs: of :class:`Inputs`; the gradient of o [C, V]; the state this chunk starts with [V, K]; the gradient of the
        row's last state; gradients of q, k [C, K], v [C, V], g [C, K] and beta [1, C]; the gradient of the row's first
        state; the same carried over chunks.
      precision: of products.
    """
    inputs, (d_o, start, d_last, dq, dk, dv, dg, d_beta, d_first, carried) = Inputs(*refs[:7]), refs[7:]
    _begin(carried, d_last[...])
    d_state, chunk = carried[...], _read(inputs, precision)
    out, d_right, carried[...] = _reverse(chunk, d_o, d_state, precision)
    _finish(d_first, carried)

    state, decays = start[...], chunk.decays
    decayed = chunk.bk * decays.start
    written = dot(chunk.inverse, chunk.beta * chunk.v - dot(decayed, state, NT, precision), NN, precision)
    outer = jnp.concatenate([out, -d_right])  # [2C, V]: gradients of what q and -bk read
    d_pairs = dot(outer, written, NT, precision)
    d_rows = dot(outer, state, NN, precision) * jnp.concatenate([decays.start] * 2)
    d_ends = dot(written, d_state, NN, precision) * decays.end
    of = pairs.products_bwd(chunk.q, chunk.bk, chunk.k, d_pairs[:CHUNK], d_pairs[CHUNK:], decays, precision)
    starts = chunk.q * d_rows[:CHUNK] + chunk.bk * d_rows[CHUNK:]
    whole = decays.whole * jnp.sum(state * d_state, axis=0, keepdims=True)
    log = pairs.spread(of, starts, chunk.k * d_ends, whole, precision)
    d_bk = of.bk + d_rows[CHUNK:]
    dq[...] = ((of.q + d_rows[:CHUNK]) * inputs.scale[0, 0]).astype(dq.dtype)
    dk[...] = (of.k + d_ends + chunk.beta * d_bk).astype(dk.dtype)
    dv[...] = (chunk.beta * d_right).astype(dv.dtype)
    dg[...] = jnp.where(chunk.valid, log, 0.0).astype(dg.dtype)
    d_beta[...] = pairs.row(jnp.sum(d_right * chunk.v, axis=1, keepdims=True) + _sum(d_bk * chunk.k))


def backward_summary(*refs: Ref, precision: lax.PrecisionLike) -> None:
    """The gradient of a shard's first state alone, which needs no states.

    Args:
      refs: as of :func:`backward`, without the chunk's state and the other gradients.
      precision: of products.
    """
    inputs, (d_o, d_last, d_first, carried) = Inputs(*refs[:7]), refs[7:]
    _begin(carried, d_last[...])
    chunk = _read(inputs, precision)
    carried[...] = _reverse(chunk, d_o, carried[...], precision)[2]
    _finish(d_first, carried)


def _read(refs: Inputs, precision: lax.PrecisionLike) -> Chunk:
    """The chunk, wide, without what padding holds."""
    flag = jnp.broadcast_to(pairs.column(refs.flags[...]), refs.k.shape)
    valid = flag > 0.0
    q, k, v, g = (jnp.where(valid, x[...].astype(jnp.float32), 0.0) for x in (refs.q, refs.k, refs.v, refs.g))
    decay = jnp.where((g == -jnp.inf) | (flag == float(RESTART)), 0.0, jnp.exp(g))
    q, beta = q * refs.scale[0, 0], pairs.column(refs.beta[...])
    bk, decays = beta * k, pairs.decays_of(decay)
    scores, a = pairs.products(q, bk, k, decays, precision)
    return Chunk(valid, q, k, v, beta, bk, decays, scores, pairs.unit_lower_inverse(a, precision))


def _moved(chunk: Chunk, state: jax.Array, written: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """The state after the chunk."""
    return chunk.decays.whole * state + dot(written, chunk.k * chunk.decays.end, TN, precision)


def _reverse(chunk: Chunk, d_o: Ref, d_state: jax.Array, precision: lax.PrecisionLike):
    """Gradients of o without padding [C, V], of beta v - beta e^G k S [C, V], and of the state before the chunk."""
    out = jnp.where(chunk.valid, d_o[...].astype(jnp.float32), 0.0)
    d_written = dot(chunk.scores, out, TN, precision) + dot(chunk.k * chunk.decays.end, d_state, NT, precision)
    d_right = dot(chunk.inverse, d_written, TN, precision)
    decayed = jnp.concatenate([chunk.q, chunk.bk]) * jnp.concatenate([chunk.decays.start] * 2)
    before = chunk.decays.whole * d_state + dot(jnp.concatenate([out, -d_right]), decayed, TN, precision)
    return out, d_right, before


def _begin(carried: Ref, value: jax.Array) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = value


def _finish(out: Ref, carried: Ref) -> None:
    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        out[...] = carried[...]


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=1, keepdims=True)
