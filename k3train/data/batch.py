"""What one step reads: the batch and its hash. Imports no JAX."""

from typing import Any, NamedTuple

import numpy as np

_SALTS = (0x9E3779B9, 0x7F4A7C15)


class Batch(NamedTuple):
    """Packed rows, each array [B, T]: NumPy on the host, jax arrays (or their shapes) in the step."""

    tokens: Any
    """int32 token ids; the pad id (0 where there is none) in padding."""
    targets: Any
    """int32 next token of the same document, masked or not; 0 where there is none."""
    segment_ids: Any
    """int32 documents counted from 1 in each row; 0 is padding."""
    loss_mask: Any
    """bool: the target is in the same document and counts in the loss."""


def batch_hash(batch: Batch) -> str:
    """16 hex digits over token ids, documents and their places in global sample order, whatever the mesh or host count.

    The batch must hold all rows of the step, as NumPy arrays. The step computes the same of what lies on the devices.
    """
    return hash_text(hash_words(np.asarray(batch.tokens), np.asarray(batch.segment_ids), np))


def hash_text(words: Any) -> str:
    """The two words of ``hash_words`` as hex digits."""
    return "".join(f"{int(word):08x}" for word in words)


def hash_words(tokens: Any, segment_ids: Any, xp: Any) -> Any:
    """Two uint32 sums over a mix of each token, its document number in the row, and its place, wrapping.

    A sum does not care how the rows are dealt out, so that devices add up their own and nothing is gathered.

    Args:
      tokens, segment_ids: integers [B, T], all rows of a step.
      xp: NumPy or jax.numpy.
    """
    ids, documents = tokens.astype(xp.uint32), segment_ids.astype(xp.uint32)
    places = xp.arange(tokens.size, dtype=xp.uint32).reshape(tokens.shape)
    words = [_mix(_mix(_mix(places ^ xp.uint32(salt), xp) ^ ids, xp) ^ documents, xp) for salt in _SALTS]
    return xp.stack([xp.sum(word, dtype=xp.uint32) for word in words])


def _mix(x: Any, xp: Any) -> Any:
    """Finaliser of MurmurHash3 (Austin Appleby, public domain): a bijection of 32 bits, wrapping."""
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    return x ^ (x >> xp.uint32(16))
