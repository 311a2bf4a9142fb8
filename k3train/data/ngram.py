"""A byte n-gram baseline: interpolated Kneser-Ney, fitted on the training side, scored held out. Imports no JAX.

Probabilities follow Chen and Goodman 1998 (interpolated form, one discount an order, D = n1 / (n1 + 2 n2)): the highest
order uses counts, lower ones the number of different symbols seen before; the lowest is interpolated with the uniform
distribution. Symbols are the 256 bytes and, where the store ends documents with it, EOS; contexts never reach over the
start of a document. The convention of bits per byte is that of ``data/holdout.py``.
"""

from dataclasses import dataclass

import numpy as np

from k3train.config.errors import UserError
from k3train.data.fill_in_middle import restored
from k3train.data.store import Split, Store
from k3train.data.tokenizer import Tokenizer

_EOS, _BOS, _START = 256, 257, 258
_SYMBOLS = 259
MAX_ORDER = 7
"""Symbols of a context and its continuation fit 63 bits."""


@dataclass(frozen=True)
class NGramResult:
    """Score of the baseline on the held-out side."""

    order: int
    bits_per_byte: float
    supervised: int
    """Symbols scored."""
    source_bytes: int
    """Bytes of text among them."""


def evaluate_ngram(store: Store, tokenizer: Tokenizer, order: int = 3) -> NGramResult:
    """Fit on ``store.train``, score ``store.holdout``.

    Args:
      store: an opened store.
      tokenizer: the one that made it; other than bytes, its tokens are decoded to bytes first.
      order: symbols of a gram: ``order - 1`` before and the one that is predicted; 1 to 7.

    Raises:
      UserError: an order that does not fit, or nothing is held out.
    """
    if not 1 <= order <= MAX_ORDER:
        raise UserError(f"--order {order}: the n-gram baseline takes 1 to {MAX_ORDER}")
    if store.holdout.documents == 0:
        raise UserError(f"{store.path}: no document is held out; raise data.holdout and prepare the store anew")
    if len(store.holdout.masked):
        raise UserError(
            f"{store.path}: its masks leave out targets (data.source.prompt_field, masked_field), and the n-gram "
            "baseline scores all text, so that the two are not comparable"
        )
    levels = _fit(_grams(*_symbols(store.train, store, tokenizer), order), order)
    symbols, starts = _symbols(store.holdout, store, tokenizer)
    grams = _grams(symbols, starts, order)
    nats = -np.log(_probability(levels, grams, 256 + store.header.add_eos)).sum()
    # Grams end with the predicted symbol.
    source_bytes = int((grams % _SYMBOLS < 256).sum())
    return NGramResult(order, float(nats / np.log(2) / source_bytes), len(grams), source_bytes)


def _symbols(split: Split, store: Store, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """All symbols of a split, int64 [n], and where documents start, int64 [documents]."""
    if store.header.tokenizer.kind == "bytes":
        tokens = split.read(0, split.tokens).astype(np.int64)
        made_by = store.header.tokenizer
        return np.select([tokens == made_by.eos_id, tokens == made_by.bos_id], [_EOS, _BOS], tokens), split.doc_offsets[
            :-1
        ]
    before = [_BOS] if store.header.add_bos else []
    after = [_EOS] if store.header.add_eos else []
    parts = []
    for index in range(split.documents):
        text = tokenizer.decode(restored(split.document(index), store.header)).encode("utf-8")
        parts.append(np.concatenate([before, np.frombuffer(text, np.uint8), after]).astype(np.int64))
    lengths = np.array([len(part) for part in parts], np.int64)
    return np.concatenate(parts), np.cumsum(lengths) - lengths


def _grams(symbols: np.ndarray, starts: np.ndarray, order: int) -> np.ndarray:
    """Grams that end at each symbol but document starts, as numbers to base ``_SYMBOLS``; int64 [n - documents]."""
    position = np.arange(len(symbols))
    first = np.zeros(len(symbols), np.int64)
    first[starts] = starts
    inside = position - np.maximum.accumulate(first)  # [n] place within the document
    grams = symbols.copy()
    for back in range(1, order):
        earlier = np.where(inside >= back, np.roll(symbols, back), _START)
        grams += earlier * _SYMBOLS**back
    return grams[inside > 0]


@dataclass(frozen=True)
class _Level:
    """One order: sorted grams with their counts, sorted contexts with their sums and numbers of different symbols."""

    grams: np.ndarray
    counts: np.ndarray
    contexts: np.ndarray
    sums: np.ndarray
    kinds: np.ndarray
    discount: float


def _fit(grams: np.ndarray, order: int) -> list[_Level]:
    """Levels of order 1 to ``order``."""
    levels = []
    unique, counts = np.unique(grams, return_counts=True)
    for length in range(order, 0, -1):
        contexts, starts = np.unique(unique // _SYMBOLS, return_index=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        sums, kinds = np.add.reduceat(counts, starts), np.diff(np.append(starts, len(unique)))
        levels.append(_Level(unique, counts, contexts, sums, kinds, discount))
        # Each different longer gram counts once for the shorter one that it ends with.
        unique, counts = np.unique(unique % _SYMBOLS ** (length - 1), return_counts=True)
    return levels[::-1]


def _probability(levels: list[_Level], grams: np.ndarray, targets: int) -> np.ndarray:
    """Probability of the last symbol of each gram after the others, float64 [n]."""
    probability = np.full(len(grams), 1 / targets)
    for length, level in enumerate(levels, start=1):
        gram = grams % _SYMBOLS**length
        count = _lookup(level.grams, level.counts, gram)
        total = _lookup(level.contexts, level.sums, gram // _SYMBOLS)
        kinds = _lookup(level.contexts, level.kinds, gram // _SYMBOLS)
        known = total > 0
        seen = np.maximum(total, 1)
        mixed = (np.maximum(count - level.discount, 0) + level.discount * kinds * probability) / seen
        probability = np.where(known, mixed, probability)
    return probability


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """``values`` at the sorted ``keys``, 0 where a key is absent."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
