"""Token embedding."""

import jax
from flax import nnx

from k3train.kernels.embedding.api import lookup
from k3train.models.param import normal, param


class Embedding(nnx.Module):
    """Table of one vector a token id."""

    def __init__(self, vocab: int, hidden: int, init_std: float, *, rngs: nnx.Rngs):
        self.table = param(rngs, (vocab, hidden), normal(init_std), ("vocab", "embed"), decay=True)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Vectors [B, T, D] of token ids [B, T] int32; ids must lie in the vocabulary (the store checks them)."""
        return lookup(self.table[...], tokens)
