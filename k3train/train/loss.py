"""The training loss: token cross-entropy over a global count of supervised tokens, in one place.

Shapes: B rows, T tokens, D hidden.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from k3train.data.batch import Batch
from k3train.kernels.config import KernelsConfig
from k3train.kernels.cross_entropy.api import CrossEntropy, cross_entropy
from k3train.models.decoder import Decoder
from k3train.parallel.activations import ROWS, TOKENS, names, on_each_device, split
from k3train.parallel.axes import stored

TOKEN_BLOCK = 8192
"""Tokens a device scores at a time; with the vocabulary chunk it bounds the logits that live at once."""


class TokenCounts(NamedTuple):
    """Supervised tokens of a whole global batch, counted before any microbatch runs (float32 scalars)."""

    main: jax.Array
    mtp: jax.Array


def mtp_targets(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Targets two tokens ahead [B, T] int32, and where they are supervised [B, T] bool.

    The token after next counts where it lies in the same document and is no masked one; the last column has none.
    """

    def ahead(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)

    same = ahead(batch.segment_ids) == batch.segment_ids
    return ahead(batch.targets), ahead(batch.loss_mask) & same


def count_tokens(batch: Batch) -> TokenCounts:
    """Counts the supervised tokens of ``batch``; over all devices when its arrays are global."""
    _, mask = mtp_targets(batch)
    return TokenCounts(batch.loss_mask.sum(dtype=jnp.float32), mask.sum(dtype=jnp.float32))


def batch_loss(
    decoder: Decoder,
    params: dict,
    buffers: dict,
    batch: Batch,
    counts: TokenCounts,
    kernels: KernelsConfig,
    z_loss: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This (micro)batch's share of the loss; the shares of a global batch add up to its mean loss.

    loss = sum(cross-entropy + z_loss * logsumexp^2) / counts.main + mtp_weight * sum(mtp cross-entropy) / counts.mtp

    Args:
      params: compute copy.
      counts: of the whole global batch. A batch without supervised tokens has loss 0, not NaN.

    Returns:
      The loss (float32 scalar, nats) and a dict: ``loss`` (cross-entropy alone), ``z_loss``, ``accuracy``,
      ``mtp_loss`` shares, and the decoder's statistics.
    """
    mtp = decoder.cfg.mtp
    hidden = decoder(params, buffers, batch.tokens, batch.segment_ids, batch.targets if mtp else None)
    head = decoder.head(params)
    main = token_entropy(hidden.main, head, batch.targets, batch.loss_mask, kernels, z_loss)
    count = jnp.maximum(counts.main, 1).astype(main.loss_sum.dtype)
    parts = {
        "loss": main.loss_sum / count,
        "z_loss": main.z_sum / count,
        "accuracy": main.correct.astype(count.dtype) / count,
    }
    total = parts["loss"] + parts["z_loss"]
    if hidden.mtp is not None and mtp is not None:
        targets, mask = mtp_targets(batch)
        extra = token_entropy(hidden.mtp, head, targets, mask, kernels).loss_sum
        parts["mtp_loss"] = extra / jnp.maximum(counts.mtp, 1).astype(extra.dtype)
        total = total + mtp.loss_weight * parts["mtp_loss"]
    return total, parts | hidden.stats


def token_entropy(
    states: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    kernels: KernelsConfig,
    z_loss: float = 0.0,
) -> CrossEntropy:
    """Cross entropy summed over all tokens of all devices; each scores its own.

    Args:
      states: [B, T, D] final hidden states.
      head: [D, V]; gathered over the mesh a chunk of the vocabulary at a time.
      targets, mask: [B, T].
      kernels: implementation and chunk.
      z_loss: weight of logsumexp^2.
    """
    where = split(states.shape, (ROWS, TOKENS))
    rows = next(iter(stored(head.shape, ("embed", None))), None)
    axes = names(rows)

    def own(states: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array) -> CrossEntropy:
        sums = cross_entropy(
            states.reshape(-1, states.shape[-1]),
            head,
            targets.reshape(-1),
            mask.reshape(-1),
            z_loss=z_loss,
            chunk=kernels.cross_entropy_chunk,
            token_block=TOKEN_BLOCK,
            implementation=kernels.cross_entropy,
            axes=axes,
        )
        return jax.tree.map(lambda x: x[None], sums)

    each = P(names(where[0]) + names(where[1]))
    sums = on_each_device(own, (states, head, targets, mask), (P(*where, None), P(rows), where, where), each)
    return jax.tree.map(jnp.sum, sums)
