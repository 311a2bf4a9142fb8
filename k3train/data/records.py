"""What a reader of text makes of a source: documents, and records that are none. Imports no JAX."""

from dataclasses import dataclass, field, replace
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
    masked: tuple[tuple[int, int], ...] = ()
    """Characters [start, stop) of the text that are no target of the loss, rising."""

    def parts(self) -> list[tuple[str, bool]]:
        """The text cut where the mask changes: (characters, whether they are masked), none empty."""
        found, at = [], 0
        for start, stop in self.masked:
            found += [(self.text[at:start], False), (self.text[start:stop], True)]
            at = stop
        return [part for part in [*found, (self.text[at:], False)] if part[0]]


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
    prompt: str | None = None
    masked: str | None = None

    @property
    def beside(self) -> tuple[str, ...]:
        """All that is taken beside the text."""
        return tuple(dict.fromkeys((*self.metadata, *filter(None, (self.prompt, self.masked)))))

    def of(self, record: dict[str, Any]) -> dict[str, Any]:
        """The metadata of a record."""
        return {name: record.get(name) for name in self.metadata}

    def document(self, plain: Document, record: dict[str, Any], raw: bytes = b"") -> "Record":
        """A document with metadata, prompt and mask, of the fields of its record; or what is wrong with them."""
        for name in (self.prompt, self.masked):
            if name is not None and name not in record:
                names = ", ".join(map(repr, list(record)[:6])) or "none"
                return _bad(plain, "missing field", f"no {name!r}; it has {names}", raw)
        text, masked = plain.text, ()
        if self.masked is not None:
            masked = _spans(record[self.masked], len(text))
            if masked is None:
                detail = f"{self.masked!r} is no rising list of [start, stop] within {len(text)} characters of text"
                return _bad(plain, "broken mask", detail, raw)
        if self.prompt is not None:
            prompt = record[self.prompt]
            if not isinstance(prompt, str):
                return _bad(plain, "field is not text", f"{self.prompt!r} is {json_type(prompt)}", raw)
            if not _is_unicode(prompt):
                return _bad(plain, "invalid Unicode", f"a lone surrogate in {self.prompt!r}", raw)
            moved = [(start + len(prompt), stop + len(prompt)) for start, stop in masked]
            if prompt and moved and moved[0][0] == len(prompt):  # prompt and mask in one
                moved[0] = (0, moved[0][1])
            elif prompt:
                moved = [(0, len(prompt)), *moved]
            text, masked = prompt + text, tuple(moved)
        if masked == ((0, len(text)),):
            return _bad(plain, "all masked", "no character is a target of the loss", raw)
        return replace(plain, text=text, masked=masked, metadata=self.of(record) if self.metadata else {})


def place(record: Record) -> tuple[str, int]:
    """What names a record for good, however its file is cut into pieces: file, and byte offset or row."""
    return record.file, record.offset if record.offset >= 0 else record.line


def _bad(plain: Document, kind: str, detail: str, raw: bytes) -> BadRecord:
    return BadRecord(plain.file, plain.line, plain.offset, kind, detail, raw)


def _spans(value: Any, length: int) -> tuple[tuple[int, int], ...] | None:
    """The ranges that a record lists, those that touch as one; None where they are none."""
    found: list[tuple[int, int]] = []
    if value is not None and not isinstance(value, list | tuple):
        return None
    for span in value or ():
        if not isinstance(span, list | tuple) or len(span) != 2 or any(type(at) is not int for at in span):
            return None
        start, stop = span
        if not (found[-1][1] if found else 0) <= start < stop <= length:
            return None
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


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
