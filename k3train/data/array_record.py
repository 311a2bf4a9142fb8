"""Documents out of ArrayRecord files: each record a JSON object or a ``tf.train.Example``. Imports no JAX.

An Example is read from its wire format (protobuf: Example.features = 1, Features.feature = 1, a map of name = 1 and
Feature = 2, Feature.bytes_list = 1, BytesList.value = 1), which spares the library that defines it.
"""

from collections.abc import Iterator
from typing import Any

from k3train.data.extras import need
from k3train.data.files import on_disk
from k3train.data.records import BadRecord, Document, Fields, Record
from k3train.data.text_files import parse_line

_READ = 256


def read_array_record(path: str, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Documents of records [start, stop); rows are counted from 1."""
    with on_disk(path) as local:
        try:
            reader = _reader(local)
        except (RuntimeError, ValueError, IndexError) as error:
            yield BadRecord(path, 1, -1, "broken array record", f"{_short(error)}; the whole file is lost")
            return
        try:
            end: int = reader.num_records() if stop is None else stop
            if end == 0:
                yield BadRecord(path, 1, -1, "empty file", "no records")
            for first in range(start, end, _READ):
                try:
                    records = reader.read(first, min(first + _READ, end))
                except (RuntimeError, ValueError, IndexError) as error:
                    yield BadRecord(path, first + 1, -1, "broken array record", f"{_short(error)}; the rest is lost")
                    return
                for i, record in enumerate(records):
                    yield _parse(path, first + i + 1, record, fields)
        finally:
            reader.close()


def count_records(path: str) -> int:
    """Records of a file; 0 where it is broken, which is said when it is read."""
    with on_disk(path) as local:
        try:
            reader = _reader(local)
        except (RuntimeError, ValueError, IndexError):
            return 0
        count = reader.num_records()
        reader.close()
        return count


def _reader(local: str) -> Any:
    module = need("array_record.python.array_record_module", "an .array_record file")
    reader = module.ArrayRecordReader(local, "readahead_buffer_size:0,max_parallelism:0")
    if not reader.ok():
        # Of a broken file it says no records; what is wrong comes with the close.
        reader.close()
        raise RuntimeError
    return reader


def _short(error: Exception) -> str:
    return str(error).split(";")[0].splitlines()[0][:200] if str(error) else "no index at its end"


def _parse(path: str, row: int, record: bytes, fields: Fields) -> Record:
    if len(record) > fields.most_bytes:
        detail = f"{len(record)} bytes, and data.source.max_document_bytes is {fields.most_bytes}"
        return BadRecord(path, row, -1, "too long", detail)
    if not record.startswith(b"\n"):
        return parse_line(path, row, -1, record, fields)
    try:
        features = _example(record)
    except (ValueError, IndexError, UnicodeDecodeError):
        return BadRecord(path, row, -1, "broken record", "neither a JSON object nor a tf.train.Example", record)
    if fields.text not in features:
        names = ", ".join(map(repr, list(features)[:6])) or "no bytes"
        return BadRecord(path, row, -1, "missing field", f"no {fields.text!r}; it has {names}", record)
    try:
        text = features[fields.text].decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRecord(path, row, -1, "invalid UTF-8", f"at byte {error.start} of {fields.text!r}", record)
    if not text.strip():
        return BadRecord(path, row, -1, "empty document", "", record)
    named = {name: value.decode("utf-8", "replace") for name, value in features.items() if name in fields.beside}
    document = Document(text, path, row, -1)
    return fields.document(document, named, record) if fields.beside else document


def _example(data: bytes) -> dict[str, bytes]:
    """First bytes value of each feature that has one."""
    found = {}
    for number, features in _fields(data):
        if number != 1:
            raise ValueError("not an Example")
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b"")):
                if kind == 1:
                    found[parts[1].decode("utf-8")] = next((value for _, value in _fields(values)), b"")
    return found


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, contents) of the length-delimited fields of a protobuf message; numbers are passed over.

    Raises:
      ValueError: it is no such message.
    """
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        match tag & 7:
            case 2:
                size, at = _varint(data, at)
                at += size
                if at <= len(data):
                    yield tag >> 3, data[at - size : at]
            case 0:
                _, at = _varint(data, at)
            case 5:
                at += 4
            case 1:
                at += 8
            case _:
                raise ValueError("no such wire type")
        if at > len(data):
            raise ValueError("a field runs past the end")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
