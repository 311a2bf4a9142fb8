"""Rows of the token stream: concat-and-chunk, with documents as segments. Imports no JAX.

Row r is tokens [r*S, r*S + S + 1) of a split; its last token is a target only and begins row r + 1. A document that is
longer than the row goes on in the next one. What is left at the end and does not fill a row is not trained on.
"""

import numpy as np

from k3train.config.errors import UserError
from k3train.data.batch import Batch
from k3train.data.store import Split


def count_rows(split: Split, sequence_length: int) -> int:
    """Whole rows in the split.

    Raises:
      UserError: there is not even one.
    """
    rows = (split.tokens - 1) // sequence_length
    if rows < 1:
        raise UserError(
            f"{split.folder}: {split.tokens} tokens are fewer than one row (data.sequence_length {sequence_length} + 1)"
            "; prepare more text or shorten the row"
        )
    return rows


def dropped_tokens(split: Split, sequence_length: int) -> int:
    """Tokens at the end that fill no row."""
    return split.tokens - 1 - count_rows(split, sequence_length) * sequence_length


def cut_rows(split: Split, rows: np.ndarray, sequence_length: int, pad_id: int = 0) -> Batch:
    """The named rows, [len(rows), sequence_length]; a row past the end of the split is padded (segment 0, no loss).

    Args:
      split: the token stream.
      rows: int64 [n] row numbers.
      sequence_length: S.
      pad_id: token id that fills padding.
    """
    shape = (len(rows), sequence_length + 1)
    tokens = np.full(shape, pad_id, np.int32)  # [n, S+1]
    segments = np.zeros(shape, np.int32)  # [n, S+1]
    for i, row in enumerate(np.asarray(rows, np.int64).tolist()):
        start = min(row * sequence_length, split.tokens)
        stop = min(start + sequence_length + 1, split.tokens)
        if stop > start:
            tokens[i, : stop - start] = split.read(start, stop)
            segments[i, : stop - start] = segments_between(split, start, stop)
    loss_mask = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    # The last row of a split may end before S: its last token has no target, but it is a token of its document.
    return Batch(
        tokens=np.ascontiguousarray(tokens[:, :-1]),
        targets=np.where(loss_mask, tokens[:, 1:], np.int32(0)),
        segment_ids=np.ascontiguousarray(segments[:, :-1]),
        loss_mask=loss_mask,
    )


def segments_between(split: Split, start: int, stop: int) -> np.ndarray:
    """Documents of tokens [start, stop), counted from 1, int32 [stop - start]."""
    offsets = split.doc_offsets  # [documents + 1]
    first = int(np.searchsorted(offsets, start, side="right"))
    last = int(np.searchsorted(offsets, stop, side="left"))
    marks = np.zeros(stop - start, np.int32)
    marks[0] = 1
    marks[np.asarray(offsets[first:last]) - start] = 1
    return np.cumsum(marks, dtype=np.int32)
