"""Is this a token store, and is it whole: the header read, damage placed, addresses refused. Imports no JAX."""

import json
import zlib
from pathlib import Path

from pydantic import ValidationError

from k3train.config.errors import UserError
from k3train.config.object_store import in_object_store
from k3train.data.header import READABLE_VERSIONS, FileEntry, Header

HEADER = "header.json"
CURE = "Delete the folder and prepare it again (k3train data prepare)"


def refuse_address(path: str | Path) -> None:
    """Raise UserError where a store is to lie in an object store: it is mapped into memory, which needs a disk."""
    if in_object_store(path):
        raise UserError(
            f"data.store: {path} is no place for a token store, which is mapped from a disk; name a folder on one, and "
            "copy the store there where it lies in an object store"
        )


def read_header(path: Path) -> Header:
    """The header of a store.

    Raises:
      UserError: there is none, it is broken, or of a version that is not read.
    """
    file = path / HEADER
    if not file.is_file():
        raise UserError(
            f"{path}: no token store here (no {HEADER}). Prepare it (k3train data prepare) or mend data.store"
        )
    try:
        text = file.read_text(encoding="utf-8")
        version = json.loads(text).get("format_version")
        if version not in READABLE_VERSIONS:
            known = f"{READABLE_VERSIONS[0]} to {READABLE_VERSIONS[-1]}"
            raise UserError(f"{file}: format version {version}, but this k3train reads {known}. {CURE}")
        return Header.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(
            f"{file}: broken header ({'.'.join(map(str, first['loc']))}: {first['msg']}). {CURE}"
        ) from error
    except (ValueError, AttributeError) as error:
        reason = str(error).replace("\n", " ")
        raise UserError(f"{file}: broken header ({reason}). {CURE}") from error


def damage(file: Path, entry: FileEntry) -> str:
    """Which blocks of a damaged file differ, for the message; nothing where that is not known."""
    if not entry.block_bytes:
        return ""
    wrong = []
    with file.open("rb") as opened:
        for number, crc in enumerate(entry.blocks):
            if f"{zlib.crc32(opened.read(entry.block_bytes)):08x}" != crc:
                wrong.append(number)
    if not wrong:
        return ""
    first = wrong[0] * entry.block_bytes
    stop = min(first + entry.block_bytes, entry.bytes)
    return f" in {len(wrong)} of {len(entry.blocks)} blocks, the first being bytes {first} to {stop}"
