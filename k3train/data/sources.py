"""Text sources: which readers there are, and how files are cut into pieces of work. Imports no JAX.

Readers never stop at a bad record and never hide one: they yield it with file, line, byte offset and reason, and the
caller decides. A piece is a stretch of one file, or several small files; its cut depends on the files alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from k3train.data.array_record import count_records, read_array_record
from k3train.data.columns import arrow_batches, parquet_groups, read_arrow, read_parquet
from k3train.data.corpora import get_corpus, read_corpus
from k3train.data.header import SourceFile
from k3train.data.records import Fields, Record
from k3train.data.text_files import read_lines, read_text_file

PIECE_BYTES = 8 << 20
_MOST_PIECES = 4096


@dataclass(frozen=True)
class Piece:
    """What one worker reads at a time."""

    files: tuple[int, ...]
    """Numbers of the source files, whole where there are several."""
    start: int = 0
    """Of a single file: first byte (plain JSONL), row group (Parquet), record batch (Arrow) or record (ArrayRecord)."""
    stop: int | None = None
    """The one after the last; None where the file is read whole."""
    bytes: int = 0
    """Size on the disk, for the progress bar."""


def cut(files: list[SourceFile], piece_bytes: int | None = None) -> list[Piece]:
    """Pieces of about ``piece_bytes`` (8 MiB; more where there would be over 4096), in the order of the files."""
    if piece_bytes is None:
        piece_bytes = max(PIECE_BYTES, sum(file.bytes for file in files) // _MOST_PIECES)
    pieces: list[Piece] = []
    small: list[int] = []

    def flush() -> None:
        if small:
            pieces.append(Piece(tuple(small), bytes=sum(files[i].bytes for i in small)))
            small.clear()

    for number, file in enumerate(files):
        stretches = _stretches(file, piece_bytes) if file.bytes > piece_bytes else []
        if len(stretches) < 2:
            if sum(files[i].bytes for i in small) + file.bytes > piece_bytes:
                flush()
            small.append(number)
            continue
        flush()
        share = file.bytes // len(stretches)
        pieces += [Piece((number,), start, stop, share) for start, stop in stretches]
    flush()
    return pieces


def _stretches(file: SourceFile, piece_bytes: int) -> list[tuple[int, int]]:
    """How a large file is cut; empty where its kind can only be read from the start to the end."""
    path = file.path
    if path.endswith(".jsonl"):
        units = file.bytes
    elif path.endswith(".parquet"):
        units = parquet_groups(path)
    elif path.endswith(".arrow"):
        units = arrow_batches(path)
    elif path.endswith((".array_record", ".arrayrecord")):
        units = count_records(path)
    else:
        return []
    count = min(units, -(-file.bytes // piece_bytes))
    bounds = [units * i // count for i in range(count + 1)] if count else []
    return list(pairwise(bounds))


def read_piece(piece: Piece, paths: list[str], fields: Fields, corpus: str | None = None) -> Iterator[Record]:
    """Documents and bad records of a piece, in order.

    Args:
      piece: what to read.
      paths: the source files by number.
      fields: what to take of a record.
      corpus: name of the corpus whose archive the only file is.

    Raises:
      UserError: a file cannot be read at all, or a package for its kind is missing.
    """
    for number in piece.files:
        if corpus is not None:
            yield from read_corpus(get_corpus(corpus), Path(paths[number]))
        else:
            yield from read_file(paths[number], fields, piece.start, piece.stop)


def read_file(path: str, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Documents and bad records of a file or a stretch of it (``Piece``), in order."""
    if path.endswith(".txt"):
        yield from read_text_file(path, fields)
    elif path.endswith(".parquet"):
        yield from read_parquet(path, fields, start, stop)
    elif path.endswith(".arrow"):
        yield from read_arrow(path, fields, start, stop)
    elif path.endswith((".array_record", ".arrayrecord")):
        yield from read_array_record(path, fields, start, stop)
    else:
        yield from read_lines(path, fields, start, stop)
