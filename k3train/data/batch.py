"""What one step reads: the batch and its hash. Imports no JAX."""

import hashlib
from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Packed rows, each array [B, T]: NumPy on the host, jax arrays (or their shapes) in the step."""

    tokens: Any
    """int32 token ids; the pad id (0 where there is none) in padding."""
    targets: Any
    """int32 next token; 0 where none is supervised."""
    segment_ids: Any
    """int32 documents counted from 1 in each row; 0 is padding."""
    loss_mask: Any
    """bool: the target is in the same document and counts in the loss."""


def batch_hash(batch: Batch) -> str:
    """16 hex digits over the token ids of the rows in global sample order, whatever the mesh or host count.

    The batch must hold all rows of the step; one host's rows have a hash of their own.
    """
    tokens = np.ascontiguousarray(np.asarray(batch.tokens), dtype="<i4")
    return hashlib.blake2b(repr(tokens.shape).encode() + tokens.tobytes(), digest_size=8).hexdigest()
