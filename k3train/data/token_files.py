"""Where documents lie in files of ids that others wrote: Megatron's .bin with .idx, and plain arrays. Imports no JAX.

Layout of an .idx (Megatron-LM, ``indexed_dataset.py``, version 1, little-endian): 9 bytes ``MMIDIDX\\0\\0``, uint64
version, uint8 code of the ids' type, uint64 sequences, uint64 entries of the document index, int32 sizes of the
sequences, int64 byte offsets of them in the .bin, int64 first sequence of each document and, last, the count of
sequences.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.config.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_TYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_NUMPY = b"\x93NUMPY"


@dataclass(frozen=True)
class Documents:
    """The documents of one file of ids."""

    ids: np.ndarray
    """[tokens], mapped."""
    bounds: np.ndarray
    """int64 [documents + 1]: first token of each, then the count of tokens; no document is empty."""


def index_of(path: Path) -> Path:
    """The .idx of a Megatron .bin."""
    return path.with_suffix(".idx")


def read_megatron(path: Path) -> Documents:
    """Documents of a .bin whose .idx lies beside it.

    Raises:
      UserError: one of the two is missing, broken off, of another format, or they do not belong together.
    """
    index = index_of(path)
    if not index.is_file():
        raise UserError(f"{index}: not there; a Megatron .bin is read with the .idx of the same name beside it")
    data = index.read_bytes()
    start = len(_MAGIC) + _HEAD.size
    if not data.startswith(_MAGIC) or len(data) < start:
        raise UserError(f"{index}: no Megatron index (it does not begin with MMIDIDX)")
    version, code, sequences, entries = _HEAD.unpack_from(data, len(_MAGIC))
    if version != 1:
        raise UserError(f"{index}: version {version} of the index, and version 1 is known")
    if code not in _TYPES:
        raise UserError(f"{index}: type code {code} is none of whole numbers ({', '.join(map(str, _TYPES))})")
    wanted = start + 12 * sequences + 8 * entries
    if len(data) == wanted + sequences and sequences:
        raise UserError(f"{index}: an index of several modes (pictures among text), which is not read")
    if len(data) != wanted:
        raise UserError(f"{index}: {len(data)} bytes, and its counts ask for {wanted}; truncated or damaged")
    sizes = np.frombuffer(data, "<i4", sequences, start)
    pointers = np.frombuffer(data, "<i8", sequences, start + 4 * sequences)
    firsts = np.frombuffer(data, "<i8", entries, start + 12 * sequences)
    dtype = np.dtype(_TYPES[code])
    ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    if (sizes < 0).any() or (pointers != ends[:-1] * dtype.itemsize).any():
        raise UserError(f"{index}: sequences do not lie one after the other in the .bin; such an index is not read")
    if not entries or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(f"{index}: the document index does not run from the first sequence to the last; damaged")
    ids = _mapped(path, dtype)
    if len(ids) != ends[-1]:
        raise UserError(f"{path}: {len(ids)} ids, and {index.name} asks for {ends[-1]}; they do not belong together")
    return Documents(ids, np.unique(ends[firsts]))


def read_array(path: Path, token_type: str, document_end: int | None) -> Documents:
    """Documents of a plain array: each ends with ``document_end``; without one, the file is a document.

    Raises:
      UserError: the file has a header, or is of another width by all appearance.
    """
    with path.open("rb") as file:
        if file.read(len(_NUMPY)) == _NUMPY:
            raise UserError(f"{path}: has NumPy's header, so it is no plain array; write the ids with ndarray.tofile")
    ids = _mapped(path, np.dtype({"uint16": "<u2", "uint32": "<u4"}[token_type]))
    head = ids[: 1 << 12]
    if token_type == "uint16" and len(head) > 1 and not head[1::2].any() and head[::2].any():
        raise UserError(f"{path}: every second id is 0, as in ids of 32 bits; set data.source.token_type: uint32")
    if document_end is None:
        return Documents(ids, np.unique(np.array([0, len(ids)])))
    ends = [np.zeros(1, np.int64)]
    for start in range(0, len(ids), 1 << 24):
        ends.append(np.flatnonzero(ids[start : start + (1 << 24)] == document_end) + start + 1)
    return Documents(ids, np.unique(np.concatenate([*ends, [len(ids)]])))


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise UserError(
            f"{path}: {size} bytes are no whole number of ids of {dtype.itemsize} bytes; truncated, or of another width"
        )
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
