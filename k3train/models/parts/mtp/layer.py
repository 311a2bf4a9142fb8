"""Multi-token prediction's entry: the last hidden state and the next token's embedding become one vector."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.models.param import matrix
from k3train.models.parts.norm.layer import RMSNorm


class MTPEntry(nnx.Module):
    """Norms both inputs, concatenates and projects (DeepSeek-V3, arXiv 2412.19437 eq. 21)."""

    def __init__(self, hidden: int, eps: float, init_std: float, *, rngs: nnx.Rngs):
        self.hidden_norm = RMSNorm(hidden, eps, rngs=rngs)
        self.embedding_norm = RMSNorm(hidden, eps, rngs=rngs)
        self.projection = matrix(rngs, (2 * hidden, hidden), init_std, (None, "embed"))

    def __call__(self, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
        """Joins the hidden state of token t and the embedding of token t + 1, both [B, T, D], to [B, T, D]."""
        joined = jnp.concatenate([self.hidden_norm(hidden), self.embedding_norm(embedding)], axis=-1)
        return joined @ self.projection[...]
