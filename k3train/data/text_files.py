"""Documents out of text files: .txt (one document a file) and JSONL, plain, gzip or zstd (one a line). Imports no JAX.

A plain JSONL file may be read in pieces: a piece holds the lines that begin in it. Its lines are numbered from the
piece's start, since nobody has counted those before it; byte offsets are always the file's.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from k3train.data.extras import need
from k3train.data.files import opened, size_of
from k3train.data.records import BadRecord, Document, Fields, Record, json_type

_CHUNK = 1 << 20
_BYTE_ORDER_MARK = "\ufeff"
_KEPT = 1 << 16
"""Bytes of a record that is too long to be read that a quarantine keeps."""


def read_text_file(path: str, fields: Fields) -> Iterator[Record]:
    """The document of a .txt file."""
    if (size := size_of(path)) > fields.most_bytes:
        yield BadRecord(path, 1, 0, "too long", _too_long(size, fields))
        return
    with opened(path) as file:
        data = file.read()
    record = read_text(path, data)
    # A .txt file has no fields, so that one which is asked for is missing.
    yield (
        fields.document(record, {}, data)
        if isinstance(record, Document) and (fields.prompt or fields.masked)
        else record
    )


def read_text(name: str, data: bytes) -> Record:
    """One document from the bytes of a whole text file; line ends and byte order marks stay as they are."""
    if not data:
        return BadRecord(name, 1, 0, "empty file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{data[error.start]:02x}, {error.reason}"
        return BadRecord(name, line, error.start, "invalid UTF-8", reason, data)
    if not text.strip():
        return BadRecord(name, 1, 0, "empty document", "white space only", data)
    return Document(text, name, 1, 0)


def read_lines(path: str, fields: Fields, start: int = 0, stop: int | None = None) -> Iterator[Record]:
    """Documents of a JSONL file; of a plain one, those whose lines begin in bytes [start, stop)."""
    with opened(path) as raw:
        if path.endswith((".gz", ".zst")):
            frames = io.BufferedReader(_Frames(raw, path.rpartition(".")[2]), _CHUNK)
            yield from _read(path, frames, fields, 0, None)
        else:
            if start:
                raw.seek(start - 1)
                start += _skip_line(raw) - 1
            yield from _read(path, raw, fields, start, stop)


def count_lines(path: str, stop: int) -> int:
    """Lines of a plain file that begin before byte ``stop``, which is the first of a line or of a piece."""
    left, lines, last = stop, 0, b"\n"
    with opened(path) as file:
        while left and (part := file.read(min(_CHUNK, left))):
            lines += part.count(b"\n")
            left, last = left - len(part), part[-1:]
    return lines + (last != b"\n")


def _read(
    path: str, file: IO[bytes] | io.BufferedReader, fields: Fields, offset: int, stop: int | None
) -> Iterator[Record]:
    number = 0
    kind = path.rpartition(".")[2].replace("gz", "gzip")
    while stop is None or offset < stop:
        try:
            line = file.readline(fields.most_bytes + 1)
            size = len(line)
            if size > fields.most_bytes and not line.endswith(b"\n"):
                size += _skip_line(file)
        except EOFError:
            yield BadRecord(path, number + 1, offset, f"truncated {kind}", "the rest of the file is lost")
            return
        except Broken as error:
            yield BadRecord(path, number + 1, offset, f"broken {kind}", f"{error}; the rest of the file is lost")
            return
        if not line:
            break
        number += 1
        if size > fields.most_bytes:
            yield BadRecord(path, number, offset, "too long", _too_long(size, fields), line[:_KEPT])
        else:
            yield parse_line(path, number, offset, line, fields)
        offset += size
    if offset == 0:
        yield BadRecord(path, 1, 0, "empty file")


def _too_long(size: int, fields: Fields) -> str:
    return f"{size} bytes, and data.source.max_document_bytes is {fields.most_bytes}"


def _skip_line(file: IO[bytes] | io.BufferedReader) -> int:
    """Read to the end of the line in small parts; the bytes read."""
    size = 0
    while part := file.readline(_CHUNK):
        size += len(part)
        if part.endswith(b"\n"):
            break
    return size


def parse_line(path: str, number: int, offset: int, line: bytes, fields: Fields) -> Record:
    """The document of one JSON object.

    Args:
      path: the file.
      number: line (from 1), or row.
      offset: byte offset of the line in the file; -1 for a row.
      line: the bytes of it.
      fields: what to take.
    """

    def bad(kind: str, detail: str = "", inside: int = 0) -> BadRecord:
        return BadRecord(path, number, offset + inside if offset >= 0 else -1, kind, detail, line)

    try:
        body = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad("invalid UTF-8", f"byte 0x{line[error.start]:02x}, {error.reason}", error.start)
    if not body.strip():
        return bad("empty line")
    mark = body.startswith(_BYTE_ORDER_MARK)
    if mark and offset != 0:
        return bad("byte order mark", "inside the file, as files that were joined have it")
    body = body.removeprefix(_BYTE_ORDER_MARK)  # no part of the JSON
    try:
        record = _DECODER.decode(body)
    except json.JSONDecodeError as error:
        inside = len(body[: error.pos].encode("utf-8")) + 3 * mark
        if error.msg == "Extra data":
            return bad("two JSON values on one line", "", inside)
        return bad("broken JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}", inside)
    except (ValueError, RecursionError) as error:
        return bad("broken JSON", str(error))
    if not isinstance(record, dict):
        return bad("not a JSON object", f"it is {json_type(record)}")
    if fields.text not in record:
        names = ", ".join(map(repr, list(record)[:6])) or "none"
        return bad("missing field", f"no {fields.text!r}; it has {names}")
    if isinstance(record, _Doubled) and (twice := record.keys_twice & {fields.text, *fields.beside}):
        return bad("doubled field", f"{min(twice)!r} stands there more than once")
    text = record[fields.text]
    if not isinstance(text, str):
        return bad("field is not text", f"{fields.text!r} is {json_type(text)}")
    if not text.strip():
        return bad("empty document")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return bad("invalid Unicode", f"lone surrogate at character {error.start} of {fields.text!r}")
    document = Document(text, path, number, offset)
    return fields.document(document, record, line) if fields.beside else document


class _Doubled(dict[str, Any]):
    """An object in which a key stands more than once: the last value is taken, as JSON's readers do without a word."""

    keys_twice: set[str]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    doubled, seen = _Doubled(record), set[str]()
    doubled.keys_twice = {name for name, _ in pairs if name in seen or seen.add(name)}
    return doubled


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


class Broken(Exception):
    """The compressed frames are damaged."""


class _Frames(io.RawIOBase):
    """Bytes of gzip members or zstd frames, every last one before the place where the file breaks off.

    There it raises EOFError, and ``Broken`` where it is damaged. Of the libraries' own readers one loses what it had
    buffered, the other takes a file that breaks off for one that ends.
    """

    def __init__(self, file: IO[bytes], kind: str):
        self._file, self._is_gzip = file, kind == "gz"
        if self._is_gzip:
            self._errors: Any = zlib.error
            self._new: Callable[[], Any] = lambda: zlib.decompressobj(16 + zlib.MAX_WBITS)
        else:
            library = need("zstandard", "a .zst file")
            self._errors, self._new = (
                library.ZstdError,
                lambda: library.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
            )
        self._frame: Any = None
        self._ready, self._error = b"", ""

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; the bytes, 0 at the end."""
        while not self._ready:
            if self._error:
                raise Broken(self._error)
            part = self._file.read(_CHUNK)
            if not part:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._ready = b"".join(self._decompressed(part))
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken

    def _decompressed(self, part: bytes) -> Iterator[bytes]:
        while part:
            if self._frame is None:
                # Tapes and block devices leave zeros after the last member.
                part = part.lstrip(b"\0") if self._is_gzip else part
                if not part:
                    return
                self._frame = self._new()
            try:
                yield self._frame.decompress(part)
            except self._errors as error:
                self._error = str(error)
                return
            if not self._frame.eof:
                return
            part, self._frame = self._frame.unused_data, None
