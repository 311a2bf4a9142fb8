"""What a store holds in figures: lengths of documents, rows under each packing, the longest documents. No JAX."""

from typing import Any, NamedTuple

import numpy as np

from k3train.data.best_fit import BestFit
from k3train.data.pack import Chunks
from k3train.data.rows import Packing
from k3train.data.store import Split, Store

_QUANTILES = (0.1, 0.5, 0.9, 0.99)


class Bin(NamedTuple):
    """Documents of ``first`` to ``last`` tokens."""

    first: int
    last: int
    documents: int
    tokens: int


class Longest(NamedTuple):
    """One of the longest documents."""

    document: int
    """Number in its side."""
    tokens: int
    origin: str | None
    """``file:line``; None where the store does not know it."""


class Packed(NamedTuple):
    """Rows that a packing makes of the training side."""

    packing: Packing
    rows: int
    """0 where the side does not fill one."""
    padding_tokens: int
    """Inputs of the rows that are padding."""
    padding: float
    """The same as a share of all inputs."""
    left_out_tokens: int
    """Tokens that are in no row, neither as input nor as target."""


class SideStats(NamedTuple):
    """One side of a store. Tokens include BOS and EOS."""

    documents: int
    tokens: int
    source_bytes: int | None
    """UTF-8 bytes of the text; None where they were not counted."""
    tokens_per_byte: float | None
    mean_tokens: float
    quantiles: dict[str, int]
    """Tokens of a document, by share of the documents that have no more."""
    masked_tokens: int
    """Tokens that are no target of the loss by ``source.prompt_field`` or ``masked_field``."""
    longer_documents: int
    """Documents longer than a row."""
    longer_tokens: int
    """Tokens in them."""
    longer_share: float
    """The same as a share of all tokens."""
    histogram: list[Bin]
    longest: list[Longest]


class StoreStats(NamedTuple):
    """All of it; ``as_json`` writes it down."""

    store: str
    sequence_length: int
    train: SideStats
    holdout: SideStats
    rows: list[Packed]
    records: int
    duplicates: int
    skipped: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """As JSON has it, fields by their names."""
        return _plain(self)


def store_stats(store: Store, sequence_length: int, longest: int = 5) -> StoreStats:
    """Figures of both sides.

    Args:
      store: an opened store.
      sequence_length: S, for what depends on the row.
      longest: documents to name.
    """
    header = store.header
    uncounted = bool(header.token_files)
    return StoreStats(
        store=str(store.path),
        sequence_length=sequence_length,
        train=_side(store.train, sequence_length, longest, is_counted=not uncounted),
        holdout=_side(store.holdout, sequence_length, longest, is_counted=True),
        rows=[_concat(store, sequence_length), _best_fit(store, sequence_length)],
        records=header.records,
        duplicates=header.duplicates,
        skipped=dict(header.skipped),
    )


def histogram(lengths: np.ndarray) -> list[Bin]:
    """Documents and tokens by length: 1, 2 to 3, 4 to 7 and so on, from the shortest to the longest, none left out.

    Args:
      lengths: int64 [documents], each 1 or more.
    """
    if not len(lengths):
        return []
    # frexp gives the exponent of the next power of two exactly, which a rounded logarithm does not.
    power = np.frexp(lengths.astype(np.float64))[1] - 1
    low, high = int(power.min()), int(power.max())
    documents = np.bincount(power - low, minlength=high - low + 1)
    ends = np.cumsum(documents)
    summed = np.concatenate([[0], np.cumsum(np.sort(lengths))])
    tokens = np.diff(summed[ends], prepend=0)
    return [
        Bin(1 << exponent, (2 << exponent) - 1, int(documents[i]), int(tokens[i]))
        for i, exponent in enumerate(range(low, high + 1))
    ]


def _side(split: Split, sequence_length: int, longest: int, *, is_counted: bool) -> SideStats:
    lengths = np.diff(np.asarray(split.doc_offsets))
    source_bytes = split.counts.source_bytes if is_counted else None
    longer = lengths[lengths > sequence_length]
    longer_tokens = int(longer.sum())
    ordered = np.sort(lengths)
    # The smallest length that the share of documents does not pass.
    places = {share: max(0, int(np.ceil(share * len(ordered))) - 1) for share in _QUANTILES}
    return SideStats(
        documents=split.documents,
        tokens=split.tokens,
        source_bytes=source_bytes,
        tokens_per_byte=split.tokens / source_bytes if source_bytes else None,
        mean_tokens=split.tokens / max(split.documents, 1),
        quantiles={f"{share:g}": int(ordered[at]) for share, at in places.items()} if len(ordered) else {},
        masked_tokens=int(np.diff(split.masked, axis=1).sum()),
        longer_documents=len(longer),
        longer_tokens=longer_tokens,
        longer_share=longer_tokens / max(split.tokens, 1),
        histogram=histogram(lengths),
        longest=_longest(split, lengths, longest),
    )


def _longest(split: Split, lengths: np.ndarray, count: int) -> list[Longest]:
    found = np.lexsort((np.arange(len(lengths)), -lengths))[:count].tolist()
    origins = [split.origin(number) for number in found]
    names = [None if origin is None else f"{origin.file}:{origin.line}" for origin in origins]
    return [Longest(number, int(lengths[number]), name) for number, name in zip(found, names, strict=True)]


def _concat(store: Store, sequence_length: int) -> Packed:
    if store.train.tokens <= sequence_length:
        return Packed("concat", 0, 0, 0.0, store.train.tokens)
    plan = Chunks(store.train, sequence_length)
    return Packed("concat", plan.rows, 0, 0.0, plan.dropped)


def _best_fit(store: Store, sequence_length: int) -> Packed:
    if store.train.tokens <= sequence_length or store.train.tokens == store.train.documents:
        return Packed("best_fit", 0, 0, 0.0, store.train.tokens)
    plan = BestFit(store.train, sequence_length, keep=False)
    inputs = plan.rows * sequence_length
    share = plan.padding
    return Packed("best_fit", plan.rows, round(share * inputs), share, _alone(store.train))


def _alone(split: Split) -> int:
    return int((np.diff(np.asarray(split.doc_offsets)) < 2).sum())


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(inner) for name, inner in value._asdict().items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
