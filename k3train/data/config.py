"""The data section: where tokens come from and how rows are cut. Imports no JAX."""

from typing import Literal

from pydantic import model_validator

from k3train.config.section import Branch, Fraction, Free, NonNegative, PathText, Positive, Section, Strings


class TokenizerConfig(Section, drift="frozen"):
    """Text to token ids."""

    kind: Literal["bytes", "huggingface"] = "bytes"
    """Bytes of UTF-8, or a Hugging Face tokenizer file."""
    path: Free[PathText | None] = None
    """The ``tokenizer.json`` of kind huggingface."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> "TokenizerConfig":
        if (self.kind == "huggingface") != (self.path is not None):
            raise ValueError("tokenizer.path names the tokenizer.json of kind: huggingface, and no other kind has one")
        return self


class SourceConfig(Section, drift="free"):
    """Text that ``data prepare`` turns into the token store: a named corpus, or files."""

    corpus: str | None = None
    """A corpus of fixed version that k3train can fetch and check (``k3train data corpora``)."""
    files: Strings = ()
    """Paths or globs of .txt, .jsonl or .jsonl.gz files."""
    text_field: str = "text"
    """The field of a JSONL record that holds the text."""
    on_bad_record: Literal["error", "skip"] = "error"
    """A broken line, invalid UTF-8 or an empty document: stop, or skip and count."""

    @model_validator(mode="after")
    def _one_origin(self) -> "SourceConfig":
        if (self.corpus is None) == (not self.files):
            raise ValueError("source takes either corpus or files")
        return self


class DataConfig(Section, drift="frozen"):
    """One token store, cut into rows of ``sequence_length`` tokens."""

    store: Free[PathText]
    """Folder of the prepared tokens; ``train`` makes it from ``source`` where it is absent."""
    sequence_length: Branch[Positive]
    """Tokens in a row."""
    packing: Branch[Literal["concat", "best_fit"]] = "concat"
    """Rows cut from one stream of documents, or filled with whole documents and padding (best-fit decreasing)."""
    source: SourceConfig | None = None
    tokenizer: TokenizerConfig = TokenizerConfig()
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
