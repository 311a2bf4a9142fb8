"""Attention residuals: the learned query with which a sub-layer reads the depth (k3-facts 4)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.kernels.attn_residual.api import Row, mix
from k3train.kernels.numerics import wide
from k3train.models.param import ones, param, zeros


class AttnResidual(nnx.Module):
    """One sub-layer's pseudo-query, starting at zero so that every row counts alike (k3-facts 4.4)."""

    def __init__(self, hidden: int, eps: float, *, rngs: nnx.Rngs):
        self.eps = eps
        self.norm = param(rngs, (hidden,), ones, ("embed",))
        self.query = param(rngs, (hidden,), zeros, ("embed",))

    def __call__(self, bank: jax.Array, filled: jax.Array, rows: Sequence[Row]) -> tuple[jax.Array, dict]:
        """Mixes the bank's filled rows and ``rows``; shapes as in :func:`k3train.kernels.attn_residual.api.mix`.

        Returns:
          The sub-layer's input [B, T, D], and {"entropy", "weight_max"}: means over tokens of the weights'
          entropy (nats) and largest weight.
        """
        query = wide(self.norm[...]) * wide(self.query[...])
        mixed, weights = mix(bank, filled, rows, query, self.eps)
        weights = jax.lax.stop_gradient(weights)
        logs = jnp.log(jnp.maximum(weights, jnp.finfo(weights.dtype).tiny))
        stats = {"entropy": -jnp.sum(weights * logs, axis=0).mean(), "weight_max": weights.max(axis=0).mean()}
        return mixed, stats
