"""The kernels in order, forward and backward, on arrays in the form the kernels load."""

import jax
import jax.numpy as jnp

from k3train.kernels.kda.mosaic_gpu import recurrence, segments
from k3train.kernels.kda.mosaic_gpu.gradients import Grads, Passed, gradients
from k3train.kernels.kda.mosaic_gpu.intra import Raw, intra
from k3train.kernels.kda.mosaic_gpu.parts import CHUNK, Form


def forward(form: Form, raw: Raw, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] bfloat16 and the last state [B, H, K, V] float32, from the first."""
    factors, state = intra(form, raw, inverse=False), _turned(state)
    parts = _segments(raw)
    if parts == 1:
        o, end = recurrence.outputs(factors, state)
        return o, _turned(end)
    factors = segments.cut(factors, parts)
    start = segments.starts(factors, recurrence.transition(factors), state, parts)
    o, end = recurrence.outputs(factors, start)
    return segments.joined(o, parts), _turned(end[parts - 1 :: parts])


def backward(form: Form, raw: Raw, state: jax.Array, d_o: jax.Array, d_state: jax.Array) -> tuple[Grads, jax.Array]:
    """Gradients of ``raw``, and of the first state [B, H, K, V]. The chunks' factors and states are formed again.

    While it runs, a token and head take 256 bytes in each of six arrays, 128 in two, 8 for decays, and 512 in each of
    the two of states: 2,824 in all besides arguments and results.
    """
    factors, state, d_state = intra(form, raw, inverse=True), _turned(state), _turned(d_state)
    inverse = factors.inverse
    assert inverse is not None
    parts = _segments(raw)
    end, pulled = d_state, d_o
    if parts > 1:
        factors, pulled = segments.cut((factors, d_o), parts)
        moves = recurrence.transition(factors)
        state = segments.starts(factors, moves, state, parts)
        end = segments.ends(factors, moves, pulled, d_state, parts)
    written, before, _ = recurrence.states(factors, state)
    d_written, after, d_start = recurrence.reverse(factors, pulled, end)
    before, after, written, d_written = (segments.joined(x, parts) for x in (before, after, written, d_written))
    found = gradients(form, raw, Passed(inverse, before, after, written, d_written, d_o))
    return found, _turned(d_start[::parts])


def _segments(raw: Raw) -> int:
    batch, tokens, heads, _ = raw.q.shape
    return segments.count(batch, heads, tokens // CHUNK)


def _turned(state: jax.Array) -> jax.Array:
    return jnp.swapaxes(state, -1, -2)
