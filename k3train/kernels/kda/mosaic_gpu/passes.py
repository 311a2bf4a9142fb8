"""The kernels in order, forward and backward, on arrays in the form the kernels load."""

import jax
import jax.numpy as jnp

from k3train.kernels.kda.mosaic_gpu.gradients import Grads, Passed, gradients
from k3train.kernels.kda.mosaic_gpu.intra import Raw, intra
from k3train.kernels.kda.mosaic_gpu.parts import Form
from k3train.kernels.kda.mosaic_gpu.recurrence import outputs, reverse, states


def forward(form: Form, raw: Raw, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] bfloat16 and the last state [B, H, K, V] float32, from the first."""
    o, end = outputs(intra(form, raw, inverse=False), jnp.swapaxes(state, -1, -2))
    return o, jnp.swapaxes(end, -1, -2)


def backward(form: Form, raw: Raw, state: jax.Array, d_o: jax.Array, d_state: jax.Array) -> tuple[Grads, jax.Array]:
    """Gradients of ``raw``, and of the first state [B, H, K, V]. The chunks' factors and states are formed again.

    While it runs, a token and head take 256 bytes in each of seven arrays, 128 in two, and 512 in each of the two of
    states: 3,072 in all.
    """
    factors = intra(form, raw, inverse=True)
    written, before, _ = states(factors, jnp.swapaxes(state, -1, -2))
    d_written, after, d_start = reverse(factors, d_o, jnp.swapaxes(d_state, -1, -2))
    assert factors.inverse is not None
    found = gradients(form, raw, Passed(factors.inverse, before, after, written, d_written, d_o))
    return found, jnp.swapaxes(d_start, -1, -2)
