"""Output head: hidden vectors to vocabulary logits."""

import jax
from flax import nnx

from k3train.models.param import normal, param


class Head(nnx.Module):
    """One matrix [D, V]; the loss reads it in chunks and never forms all logits."""

    def __init__(self, hidden: int, vocab: int, init_std: float, *, rngs: nnx.Rngs):
        self.weight = param(rngs, (hidden, vocab), normal(init_std), ("embed", "vocab"), decay=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] of hidden vectors [..., D]."""
        return x @ self.weight[...]
