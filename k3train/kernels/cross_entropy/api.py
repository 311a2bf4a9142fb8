"""Next-token cross entropy straight from hidden states, without the [N, V] logits (design.md 4).

N tokens, D hidden, V vocabulary.
"""

from typing import Literal, NamedTuple

import jax

from k3train.kernels.cross_entropy import chunked, reference


class CrossEntropy(NamedTuple):
    """Sums over supervised tokens; the caller divides by their global count."""

    loss_sum: jax.Array
    """Sum of -log p(target), wide scalar."""
    z_sum: jax.Array
    """Sum of z_loss * logsumexp^2, wide scalar; 0 where z_loss is 0."""
    correct: jax.Array
    """Tokens whose largest logit is the target's (the first of equals), int32 scalar."""


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    *,
    z_loss: float = 0.0,
    chunk: int = 8192,
    token_block: int = 8192,
    implementation: Literal["auto", "chunked", "reference"] = "auto",
    axes: tuple[str, ...] = (),
) -> CrossEntropy:
    """Cross entropy of ``hidden @ head``.

    Args:
      hidden: [N, D] final hidden states in compute dtype.
      head: [D, V] output head, multiplied in ``hidden``'s dtype; products accumulate wide.
      targets: [N] int32 in [0, V).
      mask: [N] bool, True where supervised; other tokens add nothing and get exactly zero gradient.
      z_loss: weight of logsumexp^2.
      chunk: vocabulary entries scored at a time (chunked form).
      token_block: tokens scored at a time (chunked form): at most [token_block, chunk] wide logits live at
        once, 256 MiB by default.
      implementation: ``auto`` is ``chunked``.
      axes: inside ``shard_map``, the mesh axes that split the head's rows: it is gathered a chunk at a time, and its
        gradient scattered. Sums are of this device's tokens.

    Returns:
      Sums; differentiable in ``hidden`` and ``head`` through ``loss_sum`` and ``z_sum``.
    """
    if implementation == "reference":
        head = jax.lax.all_gather(head, axes, axis=0, tiled=True) if axes else head
        return CrossEntropy(*reference.cross_entropy(hidden, head, targets, mask, z_loss))
    return CrossEntropy(*chunked.cross_entropy(hidden, head, targets, mask, z_loss, chunk, token_block, axes))
