"""Writers of every kind of source file, for tests."""

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter


def jsonl(rows: list[dict]) -> bytes:
    """One object a line."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def example(row: dict) -> bytes:
    """A tf.train.Example of byte features; numbers become int64 features."""
    entries = b""
    for name, value in row.items():
        feature = _field(1, _field(1, value.encode())) if isinstance(value, str) else _field(3, _field(1, b"\x07"))
        entries += _field(1, _field(1, name.encode()) + _field(2, feature))
    return _field(1, entries)


def _array_record(file: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def _parquet(file: Path, rows: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=7)


def _arrow(file: Path, rows: list[dict], new: Callable) -> None:
    table = pa.Table.from_pylist(rows)
    with file.open("wb") as out, new(out, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=9):
            writer.write_batch(batch)


def hugging_face(folder: Path, rows: list[dict]) -> None:
    """A folder as ``save_to_disk`` writes it, in two files of the streamed format."""
    folder.mkdir()
    half = len(rows) // 2
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:half], rows[half:]), strict=True):
        _arrow(folder / name, part, pa.ipc.new_stream)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def megatron(file: Path, documents: list[list[list[int]]], dtype: str = "<u2", **changes: object) -> None:
    """A Megatron pair of .bin and .idx; a document is a list of sequences."""
    code = {"|u1": 1, "|i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}[dtype]
    sequences = [sequence for document in documents for sequence in document]
    sizes = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = (np.cumsum(sizes, dtype="<i8") - sizes) * np.dtype(dtype).itemsize
    firsts = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype("<i8")
    file.write_bytes(np.concatenate([np.array(s, dtype) for s in sequences]).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, changes.get("code", code), len(sizes), len(firsts))
    parts = sizes, changes.get("pointers", pointers), changes.get("firsts", firsts)
    file.with_suffix(".idx").write_bytes(head + b"".join(np.asarray(part).tobytes() for part in parts))


WRITERS: dict[str, Callable[[Path, list[dict]], object]] = {
    "a.jsonl": lambda file, rows: file.write_bytes(jsonl(rows)),
    "a.jsonl.gz": lambda file, rows: file.write_bytes(
        gzip.compress(jsonl(rows[:20])) + gzip.compress(jsonl(rows[20:]))
    ),
    "a.jsonl.zst": lambda file, rows: file.write_bytes(
        zstandard.compress(jsonl(rows[:20])) + zstandard.compress(jsonl(rows[20:]))
    ),
    "a.parquet": _parquet,
    "a.arrow": lambda file, rows: _arrow(file, rows, pa.ipc.new_file),
    "stream.arrow": lambda file, rows: _arrow(file, rows, pa.ipc.new_stream),
    "dataset": hugging_face,
    "a.array_record": lambda file, rows: _array_record(file, [json.dumps(row).encode() for row in rows]),
    "example.array_record": lambda file, rows: _array_record(file, [example(row) for row in rows]),
}
"""By the name of the file (or folder) that is written."""
