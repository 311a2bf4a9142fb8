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
        once, 256 MiB by default. It counts tokens of all devices: with tokens sharded over d devices pass
        d times as many. Blocks are strided through N, so that each one lies on all devices.
      implementation: ``auto`` is ``chunked``.

    Returns:
      Sums; differentiable in ``hidden`` and ``head`` through ``loss_sum`` and ``z_sum``.
    """
    if implementation == "reference":
        return CrossEntropy(*reference.cross_entropy(hidden, head, targets, mask, z_loss))
    return CrossEntropy(*chunked.cross_entropy(hidden, head, targets, mask, z_loss, chunk, token_block))
