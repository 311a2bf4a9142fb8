"""What a reader of text makes of a source: documents, and records that are none. Imports no JAX."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Document:
    """Text of one document and where it came from."""

    text: str
    file: str
    line: int
    """Line or row, counted from 1."""
    offset: int
    """Bytes from the start of the (uncompressed) file; -1 in files that have rows."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Values of the metadata fields that were asked for; null where the record has none."""


@dataclass(frozen=True)
class BadRecord:
    """What could not be read as a document."""

    file: str
    line: int
    """Line or row, counted from 1."""
    offset: int
    """Bytes from the start of the (uncompressed) file; -1 in files that have rows."""
    kind: str
    """The reason as a fixed word or two, for counting."""
    detail: str = ""
    raw: bytes = b""
    """The record as it stood there, where it can be had: what a quarantine keeps."""

    @property
    def reason(self) -> str:
        """The reason in full."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind

    def __str__(self) -> str:
        place = f"row {self.line}" if self.offset < 0 else f"line {self.line}, byte {self.offset}"
        return f"{self.file}: {place}: {self.reason}"


Record = Document | BadRecord


@dataclass(frozen=True)
class Fields:
    """What is taken of a record."""

    text: str = "text"
    metadata: tuple[str, ...] = ()
    most_bytes: int = 1 << 26
    """A longer record is refused before it fills the memory."""

    def of(self, record: dict[str, Any]) -> dict[str, Any]:
        """The metadata of a record."""
        return {name: record.get(name) for name in self.metadata}


def place(record: Record) -> tuple[str, int]:
    """What names a record for good, however its file is cut into pieces: file, and byte offset or row."""
    return record.file, record.offset if record.offset >= 0 else record.line


def json_type(value: object) -> str:
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
