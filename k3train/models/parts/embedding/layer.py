"""Token embedding."""

from functools import partial

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from k3train.kernels.embedding.api import lookup
from k3train.models.param import normal, param
from k3train.parallel.activations import ROWS, TOKENS, names, on_each_device, split
from k3train.parallel.axes import stored

AXES = ("vocab", "embed")


class Embedding(nnx.Module):
    """Table of one vector a token id."""

    def __init__(self, vocab: int, hidden: int, init_std: float, *, rngs: nnx.Rngs):
        self.table = param(rngs, (vocab, hidden), normal(init_std), AXES, decay=True)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Vectors [B, T, D] of token ids [B, T] int32; ids must lie in the vocabulary (the store checks them).

        On a mesh the table stays cut along D: ids travel to its parts, and parts of vectors come back.
        """
        table = self.table[...]
        lies = stored(table.shape, AXES)
        axes = names(lies[1]) if len(lies) > 1 else ()
        where = split(tokens.shape, (ROWS, TOKENS))
        look = partial(_look_up, axes=axes)
        return on_each_device(look, (table, tokens), (P(None, axes or None), where), P(*where, None))


def _look_up(table: jax.Array, tokens: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Vectors [b, t, D] of a device's tokens; ``axes`` cut D of the table [V, D / Z] into Z parts."""
    if not axes:
        return lookup(table, tokens)
    every = lax.all_gather(tokens, axes)  # [Z, b, t]
    parts = lookup(table, every.reshape(-1, tokens.shape[1]))
    parts = parts.reshape(*every.shape, -1)  # [Z, b, t, D / Z], by whose tokens they are
    return lax.all_to_all(parts, axes, 0, 3, tiled=True)[0]
