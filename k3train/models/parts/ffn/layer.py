"""Gated feed-forward network: ``down(act(gate(x), up(x)))`` with SiTU-GLU or SwiGLU (k3-facts 5.2)."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.numerics import wide
from k3train.models.param import matrix
from k3train.models.parts.ffn.config import ActivationConfig


def glu(gate: jax.Array, up: jax.Array, activation: ActivationConfig) -> jax.Array:
    """Gated activation of two arrays of one shape and dtype, computed wide.

    SiTU-GLU: ``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``, without
    ``linear_beta`` up as it is. SwiGLU: ``gate sigmoid(gate) * up``.

    Returns:
      The product, in the dtype of ``gate``.
    """
    g, u = wide(gate), wide(up)
    match activation.kind:
        case "situ":
            bounded = activation.beta * jnp.tanh(g / activation.beta)
            linear = (
                u if activation.linear_beta is None else activation.linear_beta * jnp.tanh(u / activation.linear_beta)
            )
        case "swiglu":
            bounded, linear = g, u
    return (bounded * jax.nn.sigmoid(g) * linear).astype(gate.dtype)


class FFN(nnx.Module):
    """Gated feed-forward network of width ``width`` on hidden states of size ``hidden``."""

    def __init__(self, width: int, hidden: int, activation: ActivationConfig, init_std: float, *, rngs: nnx.Rngs):
        self.activation = activation
        self.gate_proj = matrix(rngs, (hidden, width), init_std, ("embed", "mlp"))
        self.up_proj = matrix(rngs, (hidden, width), init_std, ("embed", "mlp"))
        self.down_proj = matrix(rngs, (width, hidden), init_std, ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``x`` [..., hidden] to the same shape and dtype."""
        gate = x @ self.gate_proj[...].astype(x.dtype)  # [..., width]
        up = x @ self.up_proj[...].astype(x.dtype)  # [..., width]
        return glu(gate, up, self.activation) @ self.down_proj[...].astype(x.dtype)
