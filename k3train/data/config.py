"""The data section: where tokens come from and how rows are cut. Imports no JAX."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3train.config.section import (
    Branch,
    Count,
    Fraction,
    Free,
    NonNegative,
    NonNegativeCount,
    NonNegativeFloat,
    PathText,
    Positive,
    Section,
    Strings,
)
from k3train.data.shares import Blocks, Phase, blocks

_SOURCE_NAME = "[A-Za-z][A-Za-z0-9_-]*"


class TokenizerConfig(Section, drift="frozen"):
    """Text to token ids."""

    kind: Literal["bytes", "huggingface", "tiktoken"] = "bytes"
    """Bytes of UTF-8, a Hugging Face tokenizer file, or tiktoken's ranks, as Kimi K2 and K3 have them."""
    path: Free[PathText | None] = None
    """The ``tokenizer.json`` of kind huggingface, the ranks (``tiktoken.model``) of kind tiktoken."""
    pattern: str | None = None
    """Regular expression that cuts text before the ranks do; none takes that of Kimi K2 and K3."""

    @model_validator(mode="after")
    def _keys_where_needed(self) -> "TokenizerConfig":
        if (self.kind == "bytes") != (self.path is None):
            raise ValueError("tokenizer.path names the file of kind: huggingface or tiktoken; kind: bytes has none")
        if self.pattern is not None and self.kind != "tiktoken":
            raise ValueError("tokenizer.pattern is for kind: tiktoken; the other kinds need none")
        return self


class FillInMiddleConfig(Section, drift="frozen"):
    """Some documents are stored with their middle last, between three special tokens, so that filling in is learned."""

    rate: Fraction = 0.5
    """Share of the training documents that are rearranged."""
    spm_rate: Fraction = 0.5
    """Share of those that begin with the suffix, then have prefix and middle as one; the others begin with the
    prefix."""
    prefix_token: str = "<fim_prefix>"
    """Name of the tokenizer's token before the prefix."""
    middle_token: str = "<fim_middle>"
    """Name of the token before the middle."""
    suffix_token: str = "<fim_suffix>"
    """Name of the token before the suffix."""
    boundaries: Literal["character", "token"] = "character"
    """Where a document may be cut: before any character, or before any token of the whole."""
    seed: NonNegative = 0
    """Key of the draw; a document is drawn by its text."""


class SourceConfig(Section, drift="free"):
    """Text that ``data prepare`` turns into the token store: a named corpus, or files."""

    corpus: str | None = None
    """A corpus of fixed version that k3train can fetch and check (``k3train data corpora``)."""
    files: Strings = ()
    """Paths, globs or gs:// and s3:// addresses of .txt, .jsonl (plain, .gz, .zst), .parquet, .arrow or .array_record
    files, or folders of Hugging Face datasets on disk."""
    kind: Literal["text", "megatron", "token_array"] = "text"
    """What the files hold: text; or tokens that are read where they lie, Megatron's pairs of .bin and .idx (the .bin is
    named), or plain arrays of ids without a header."""
    token_type: Literal["uint16", "uint32"] | None = None
    """Width of an id in a token_array; nothing in the file says it."""
    document_end: NonNegative | None = None
    """The id with which a document of a token_array ends; without it each file is one document."""
    text_field: str = "text"
    """The field or column of a record that holds the text."""
    metadata_fields: Strings = ()
    """Fields that are kept with each document."""
    prompt_field: str | None = None
    """The field whose text goes before that of ``text_field``: it is read, but no target of the loss."""
    masked_field: str | None = None
    """The field that lists the characters of the text that are no target of the loss, as [[start, stop], ...]; null
    where all are."""
    on_bad_record: Literal["error", "skip", "quarantine"] = "error"
    """A broken line, invalid UTF-8 or an empty document: stop, or skip and count, or also keep it for mending."""
    max_bad_share: Fraction = 0.001
    """Bad records among all, above which skipping stops after all."""
    max_document_bytes: Count = 64 << 20
    """A longer record is a bad one."""
    duplicates: PathText | None = None
    """A list of ``data dedup``; the documents in it are left out."""
    workers: Positive | None = None
    """Processes that read and tokenize; none takes every core."""

    @model_validator(mode="after")
    def _one_origin(self) -> "SourceConfig":
        if (self.corpus is None) == (not self.files):
            raise ValueError("source takes either corpus or files")
        for key in ("prompt_field", "masked_field"):
            if getattr(self, key) is not None and (self.corpus is not None or self.kind != "text"):
                raise ValueError(f"source.{key} names a field of the records in files of kind: text")
        if self.corpus is not None and self.kind != "text":
            raise ValueError("a corpus is of kind: text")
        if (self.kind == "token_array") != (self.token_type is not None):
            raise ValueError("source.token_type says the width of ids of kind: token_array, and no other kind has one")
        if self.document_end is not None and self.kind != "token_array":
            raise ValueError("source.document_end is for kind: token_array; other kinds know where documents end")
        return self


class NamedSource(Section, drift="free"):
    """One of several sources: a token store of its own."""

    store: PathText
    """Folder of the prepared tokens; ``train`` makes it from ``source`` where it is absent."""
    source: SourceConfig | None = None
    """As ``data.source``."""
    max_epochs: Positive | None = None
    """How often it may be read; ``data.mixture.used_up`` says what follows. None reads on."""


class PhaseConfig(Section, drift="branch"):
    """Weights from some point of the run on."""

    tokens: NonNegativeCount
    """Nominal tokens (rows x length) of the run at which the phase begins, at the next border of a block."""
    weights: dict[str, NonNegativeFloat]
    """Share of rows by source, in proportion; a source that is not named has 0."""
    blend: Literal["none", "linear"] = "none"
    """``linear``: shares move in a straight line to the next phase's, which begins with its own."""


class MixtureConfig(Section, drift="branch"):
    """How rows of several sources are mixed."""

    block: Positive = 1000
    """Rows of a block, in each of which every source has the same number of rows throughout a phase."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)]
    """Weights and where they begin to hold; the first at tokens: 0."""

    used_up: Literal["error", "reweight"] = "error"
    """Of a source that was read ``max_epochs`` times: the run ends with exit 20, or the others share its weight."""

    def blocks(
        self, names: Iterable[str], sequence_length: int, most: Mapping[str, int | None] | None = None
    ) -> Blocks:
        """What the blocks hold of the named sources.

        Args:
          most: rows that may be read of each, where ``used_up`` is ``reweight``.

        Raises:
          ValueError: see ``data/shares.py``.
        """
        phases = [Phase(phase.tokens, phase.weights, phase.blend == "linear") for phase in self.phases]
        return blocks(names, self.block, phases, sequence_length, most if self.used_up == "reweight" else None)


class DataConfig(Section, drift="frozen"):
    """A token store, or a mixture of several, cut into rows of ``sequence_length`` tokens."""

    store: Free[PathText | None] = None
    """Folder of the prepared tokens; ``train`` makes it from ``source`` where it is absent."""
    sequence_length: Branch[Positive]
    """Tokens in a row."""
    packing: Branch[Literal["concat", "best_fit"]] = "concat"
    """Rows cut from one stream of documents, or filled with whole documents and padding (best-fit decreasing)."""
    source: SourceConfig | None = None
    sources: Free[dict[str, NamedSource] | None] = None
    """Several sources by name, in place of ``store`` and ``source``; ``mixture`` says how they are mixed."""
    mixture: MixtureConfig | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
    fill_in_middle: FillInMiddleConfig | None = None
    holdout: Fraction = 0.01
    """Share of documents, chosen by hash of their text, that are never trained on."""
    add_bos: bool = True
    """Begin every document with the tokenizer's BOS."""
    add_eos: bool = True
    """End every document with the tokenizer's EOS."""
    shuffle_seed: NonNegative = 0
    """Order of the documents inside the store, and of rows within an epoch."""
    max_epochs: Free[Positive | None] = None
    """End with exit 20 when the data has been read so often; none reads on."""
    prefetch: Free[Positive] = 4
    """Batches read ahead of the step."""

    @model_validator(mode="after")
    def _one_form(self) -> "DataConfig":
        for source in (self.source, *(named.source for named in (self.sources or {}).values())):
            if self.fill_in_middle is not None and source is not None and (source.prompt_field or source.masked_field):
                raise ValueError(
                    "data.fill_in_middle rearranges documents, and source.prompt_field and source.masked_field say "
                    "what of them is no target of the loss; leave one of the two out"
                )
        if self.sources is None:
            if self.store is None:
                raise ValueError("data.store: required, or data.sources with data.mixture")
            if self.mixture is not None:
                raise ValueError("data.mixture mixes data.sources, and there are none; give them, or leave it out")
            return self
        for key in ("store", "source", "max_epochs"):
            if getattr(self, key) is not None:
                raise ValueError(f"data.{key} is for one source, and data.sources names several; set data.{key}: null")
        if self.mixture is None:
            raise ValueError("data.mixture: required with data.sources; give block and phases with weights")
        for name in self.sources:
            if not re.fullmatch(_SOURCE_NAME, name):
                raise ValueError(f"data.sources: {name!r} is no name; use letters, digits, _ and -, a letter first")
        places = [os.path.normpath(source.store) for source in self.sources.values()]
        if len(set(places)) < len(places):
            raise ValueError("data.sources: two sources have one store; give each a folder of its own")
        self.mixture.blocks(self.sources, self.sequence_length)
        return self

    @property
    def place(self) -> str:
        """The store's folder, of a section with one source (``singles``)."""
        assert self.store is not None, "a section of several sources; see DataConfig.singles"
        return self.store

    def with_stores(self, place: Callable[[str], str]) -> "DataConfig":
        """The same with the folder of each store as ``place`` says."""
        if self.sources is None:
            return self.model_copy(update={"store": place(self.place)})
        moved = {name: s.model_copy(update={"store": place(s.store)}) for name, s in self.sources.items()}
        return self.model_copy(update={"sources": moved})

    def without_sources(self) -> "DataConfig":
        """The same without the text that the stores are made from: they are taken as they are."""
        if self.sources is None:
            return self.model_copy(update={"source": None})
        bare = {name: s.model_copy(update={"source": None}) for name, s in self.sources.items()}
        return self.model_copy(update={"sources": bare})

    def without_limits(self) -> "DataConfig":
        """The same without ``max_epochs`` as an end; where it moves weights to others, it is part of the order."""
        if self.sources is None:
            return self.model_copy(update={"max_epochs": None})
        if self.mixture is not None and self.mixture.used_up == "reweight":
            return self
        endless = {name: s.model_copy(update={"max_epochs": None}) for name, s in self.sources.items()}
        return self.model_copy(update={"sources": endless})

    def singles(self) -> "dict[str, DataConfig]":
        """A section for each source by name, sorted; the section itself, under an empty name, where there is one."""
        if self.sources is None:
            return {"": self}
        return {
            name: self.model_copy(
                update={
                    "sources": None,
                    "mixture": None,
                    "store": source.store,
                    "source": source.source,
                    "max_epochs": source.max_epochs,
                }
            )
            for name, source in sorted(self.sources.items())
        }
