"""The list of documents to leave out: written by ``data dedup``, honoured by ``data prepare``. Imports no JAX.

A file of JSON lines. The first says which sources it is of; each other names one document by its file and its place
there (byte offset of its line, or row), why it is left out, and the document that is kept instead.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from k3train.config.errors import UserError
from k3train.data.header import SourceFile

FORMAT = "k3train duplicates 1"


def identity(files: list[SourceFile], text_field: str, prompt_field: str | None) -> dict[str, Any]:
    """What a list belongs to: the files' contents and the field."""
    marks = [[file.path, file.bytes, file.sha256, file.version] for file in files]
    digest = hashlib.sha256(json.dumps([marks, text_field, *filter(None, (prompt_field,))]).encode()).hexdigest()
    return {"format": FORMAT, "sources": digest, "files": len(files), "text_field": text_field}


def read_list(
    path: str, files: list[SourceFile], text_field: str, prompt_field: str | None
) -> tuple[str, dict[str, list[int]]]:
    """sha256 of the list, and the places to leave out by file name.

    Raises:
      UserError: no such file, no such list, or one of other sources.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"data.source.duplicates: {path} cannot be read ({error.strerror or error})") from error
    lines = data.split(b"\n")
    places: dict[str, list[int]] = {}
    try:
        head = json.loads(lines[0])
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']!r}")
        for line in lines[1:]:
            if line:
                entry = json.loads(line)
                places.setdefault(entry["file"], []).append(int(entry["at"]))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no list that data dedup writes ({error!r}); make it anew") from error
    if {name: head.get(name) for name in ("sources", "text_field")} != {
        name: value
        for name, value in identity(files, text_field, prompt_field).items()
        if name in ("sources", "text_field")
    }:
        raise UserError(
            f"{path}: made of other sources than data.source names, or of earlier contents of them; make it anew "
            "(k3train data dedup)"
        )
    if sum(map(len, places.values())) != head["listed"]:
        raise UserError(
            f"{path}: lists other documents than the {head['listed']} it speaks of; truncated, make it anew"
        )
    return hashlib.sha256(data).hexdigest(), places
