"""The header of a token store: what lies in it, and what it was made from. Imports no JAX."""

import hashlib
from typing import Annotated, Literal

from pydantic import Field

from k3train.config.section import Section, Strings
from k3train.data.config import FillInMiddleConfig
from k3train.data.tokenizer import Tokenizer

FORMAT_VERSION = 4
READABLE_VERSIONS = (1, 2, 3, 4)
"""Version 1 has no checksums of blocks, no metadata and no tokens read in place, version 2 no filling in of the middle,
version 3 no masks of the loss; else they are the same."""

EXTENTS = "extents.bin"
"""Of a side whose tokens are read in place, int64 [extents, 3]: first token of the side, number of the file, first
token of the file. An extent goes on until the next begins."""

BLOCK_BYTES = 16 << 20
"""Bytes of a file that one CRC-32 in the header stands for."""

Counts = dict[str, int]

ORIGINS, ORIGIN_NAMES = "doc_origins.bin", "doc_origin_names.json"
"""Where each document came from; no part of the fingerprint, since the same documents may come from other files."""
METADATA, METADATA_OFFSETS = "doc_metadata.jsonl", "doc_metadata_offsets.bin"
"""What a record said beside its text; no part of the fingerprint either."""
MASKED = "masked.bin"
"""Tokens [start, stop) of a side that are no target of the loss, int64 [n, 2], rising; absent where all are."""


class FileEntry(Section):
    """One file of the store."""

    name: str
    """Path below the store folder."""
    bytes: int
    sha256: str
    block_bytes: int = 0
    """Bytes of a block; 0 where the file has no checksums of blocks."""
    blocks: Strings = ()
    """CRC-32 of each block, 8 hex digits."""


class SplitHeader(Section):
    """Counts of one side of the store."""

    documents: int
    tokens: int
    source_bytes: int
    """UTF-8 bytes of the documents' text (without BOS and EOS, which have none)."""
    min_id: int
    max_id: int


class SourceFile(Section):
    """A file that was read."""

    path: str
    bytes: int
    mtime_ns: int
    """0 for an object of a store."""
    sha256: str
    """Empty for an object of a store."""
    version: str = ""
    """The store's mark of an object's contents (ETag)."""


class TokenFile(Section):
    """A file of ids that is read where it lies."""

    path: str
    """From the root of the disk."""
    bytes: int
    sha256: str
    dtype: Literal["|u1", "|i1", "<i2", "<u2", "<i4", "<u4", "<i8"]


class SourceHeader(Section):
    """Where the text came from."""

    kind: str = "text"
    token_type: str | None = None
    document_end: int | None = None

    corpus: str | None
    patterns: list[str]
    text_field: str
    on_bad_record: str
    metadata_fields: Strings = ()
    prompt_field: str | None = None
    masked_field: str | None = None
    max_document_bytes: int = 0
    """0 in a store that was made without a limit."""
    duplicates: str = ""
    """sha256 of the list of documents that were left out; empty where there was none."""
    licence: str
    """Stated by the corpus; "not stated" for a user's own files."""
    files: list[SourceFile]
    indices: list[SourceFile] = Field(default_factory=list)
    """The .idx of each .bin of kind megatron; empty in a store of version 2."""


class TokenizerHeader(Section):
    """The tokenizer that made the ids."""

    kind: str
    vocab_size: int
    fingerprint: str
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenizerHeader":
        """What is written down of a tokenizer."""
        return cls(**{name: getattr(tokenizer, name) for name in cls.model_fields})


class FillInMiddleHeader(FillInMiddleConfig):
    """How training documents were rearranged (``data/fill_in_middle.py``)."""

    prefix_id: int
    middle_id: int
    suffix_id: int


class Header(Section):
    """``header.json``."""

    format_version: Literal[1, 2, 3, 4] = FORMAT_VERSION
    dtype: Literal["<u2", "<u4"]
    shard_tokens: Annotated[int, Field(gt=0)]
    """Tokens in every shard but the last of a split."""
    tokenizer: TokenizerHeader
    add_bos: bool
    add_eos: bool
    holdout: float
    holdout_rule: str
    shuffle_seed: int
    fill_in_middle: FillInMiddleHeader | None = None
    """None where every document is as its text."""
    source: SourceHeader
    train: SplitHeader
    holdout_split: SplitHeader
    skipped: Counts
    """Records skipped, by reason; each one is a line of ``skips.jsonl``."""
    records: int = 0
    """Records read: documents, skipped ones and duplicates. 0 in a store of version 1."""
    duplicates: int = 0
    """Documents left out because ``data.source.duplicates`` lists them."""
    files: list[FileEntry]
    token_files: list[TokenFile] = Field(default_factory=list)
    """Files of ids that are read where they lie; the store has no shards then, and ``EXTENTS`` says what is where."""

    @property
    def fingerprint(self) -> str:
        """sha256 over all that decides which tokens are read where: token files, offsets, tokenizer."""
        digest = hashlib.sha256(f"{self.dtype} {self.shard_tokens} {self.tokenizer.fingerprint}".encode())
        for file in self.files:
            if file.name.endswith((ORIGINS, ORIGIN_NAMES, METADATA, METADATA_OFFSETS)):
                continue
            digest.update(f"{file.name} {file.bytes} {file.sha256}".encode())
        for tokens in self.token_files:
            digest.update(f"{tokens.dtype} {tokens.bytes} {tokens.sha256}".encode())
        return digest.hexdigest()
