"""Documents out of text files: .txt (one document a file), .jsonl and .jsonl.gz (one a line). Imports no JAX.

Readers never stop at a bad record and never hide one: they yield it with file, line, byte offset and reason, and the
caller decides.
"""

import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from k3train.config.errors import UserError

SUFFIXES = (".txt", ".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Document:
    """Text of one document and where it came from."""

    text: str
    file: str
    line: int
    offset: int


@dataclass(frozen=True)
class BadRecord:
    """What could not be read as a document."""

    file: str
    line: int
    """Counted from 1."""
    offset: int
    """Bytes from the start of the (uncompressed) file."""
    kind: str
    """The reason as a fixed word or two, for counting."""
    detail: str = ""

    @property
    def reason(self) -> str:
        """The reason in full."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def __str__(self) -> str:
        return f"{self.file}: line {self.line}, byte {self.offset}: {self.reason}"


def find_files(patterns: tuple[str, ...]) -> list[Path]:
    """Files of the paths and globs, each once (links followed), in the order of the patterns, sorted within each.

    Raises:
      UserError: a pattern matches nothing, a path is a folder, or a file is of a kind that is not read.
    """
    found: dict[str, Path] = {}
    for pattern in patterns:
        try:
            paths = _expand(pattern)
        except (OSError, ValueError, RuntimeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise UserError(f"data.source.files: {pattern} cannot be looked up ({reason})") from error
        if not paths:
            raise UserError(f"data.source.files: no file matches {pattern} (seen from {Path.cwd()})")
        for path in paths:
            if not path.exists():
                raise UserError(f"data.source.files: {path} is a link to nothing; mend or remove it")
            if path.is_dir():
                raise UserError(f"data.source.files: {path} is a folder; name its files, as in {path}/**/*.txt")
            if not path.name.endswith(SUFFIXES):
                raise UserError(
                    f"data.source.files: {path} is none of {', '.join(SUFFIXES)}; narrow the pattern {pattern}"
                )
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _expand(pattern: str) -> list[Path]:
    """Files that the path or glob names, and links to nothing among them; empty where there are none."""
    named = Path(pattern).expanduser()
    if glob.has_magic(str(named)) and not named.exists():
        found = [Path(name) for name in sorted(glob.glob(str(named), recursive=True))]  # noqa: PTH207
        return [path for path in found if path.is_file() or not path.exists()]
    return [named] if named.exists() else []


def read_documents(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    """Documents and bad records of one file, in its order.

    Raises:
      UserError: the file cannot be read at all.
    """
    try:
        if file.name.endswith(".txt"):
            yield read_text(str(file), file.read_bytes())
        else:
            yield from _read_lines(file, text_field)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error


def read_text(name: str, data: bytes) -> Document | BadRecord:
    """One document from the bytes of a whole text file; line ends and byte order marks stay as they are."""
    if not data:
        return BadRecord(name, 1, 0, "empty file")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return BadRecord(name, line, error.start, "invalid UTF-8", f"byte 0x{data[error.start]:02x}, {error.reason}")
    if not text.strip():
        return BadRecord(name, 1, 0, "empty document", "white space only")
    return Document(text, name, 1, 0)


def _read_lines(file: Path, text_field: str) -> Iterator[Document | BadRecord]:
    name, number, offset = str(file), 0, 0
    with gzip.open(file, "rb") if name.endswith(".gz") else file.open("rb") as lines:
        while True:
            try:
                line = lines.readline()
            except EOFError:
                yield BadRecord(name, number + 1, offset, "truncated gzip", "the rest of the file is lost")
                return
            except (gzip.BadGzipFile, zlib.error) as error:
                yield BadRecord(name, number + 1, offset, "broken gzip", f"{error}; the rest of the file is lost")
                return
            if not line:
                break
            number += 1
            yield _parse(name, number, offset, line, text_field)
            offset += len(line)
    if number == 0:
        yield BadRecord(name, 1, 0, "empty file")


def _parse(name: str, number: int, offset: int, line: bytes, text_field: str) -> Document | BadRecord:
    def bad(kind: str, detail: str = "", inside: int = 0) -> BadRecord:
        return BadRecord(name, number, offset + inside, kind, detail)

    try:
        body = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return bad("invalid UTF-8", f"byte 0x{line[error.start]:02x}, {error.reason}", error.start)
    if not body.strip():
        return bad("empty line")
    if number == 1:
        body = body.removeprefix("\ufeff")  # a byte order mark is no part of the JSON
    try:
        record = json.loads(body)
    except json.JSONDecodeError as error:
        inside = len(body[: error.pos].encode("utf-8"))
        if error.msg == "Extra data":
            return bad("two JSON values on one line", "", inside)
        return bad("broken JSON", f"{error.msg.removesuffix(' at')} at column {error.colno}", inside)
    except (ValueError, RecursionError) as error:
        return bad("broken JSON", str(error))
    if not isinstance(record, dict):
        return bad("not a JSON object", f"it is {_json_type(record)}")
    if text_field not in record:
        return bad("missing field", f"no {text_field!r}; it has {', '.join(map(repr, list(record)[:6])) or 'none'}")
    text = record[text_field]
    if not isinstance(text, str):
        return bad("field is not text", f"{text_field!r} is {_json_type(text)}")
    if not text.strip():
        return bad("empty document")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return bad("invalid Unicode", f"lone surrogate at character {error.start} of {text_field!r}")
    return Document(text, name, number, offset)


def _json_type(value: object) -> str:
    """What JSON calls a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case str():
            return "a string"
        case list():
            return "an array"
        case dict():
            return "an object"
        case _:
            return "a number"
