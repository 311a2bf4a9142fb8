"""Text to token ids and back: the byte tokenizer, ``tokenizer.json`` files; ranks are in ``ranks.py``. No JAX."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from k3train.config.errors import UserError
from k3train.data.config import TokenizerConfig
from k3train.data.special_tokens import find_specials, fingerprint

_MOST_IDS = 2**31


class Tokenizer(Protocol):
    """What the data room and the sampler ask of a tokenizer."""

    kind: str
    vocab_size: int
    """Ids run from 0 to ``vocab_size - 1``."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    fingerprint: str
    """sha256 over the tokenizer's files, its special ids and its encoding of ``special_tokens.PROBE``."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of ``text``, int32 [n]; never BOS, EOS or PAD."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """``encode`` of each text, faster than one by one."""
        ...

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of ``text`` and the UTF-8 bytes that each stands for: int32 [n], int64 [n], summing to all bytes."""
        ...

    def special_id(self, name: str) -> int | None:
        """Id of the added token of that name; None where there is none."""
        ...

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """Text of ``ids`` without special tokens; broken UTF-8 becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8 text, then padding, BOS and EOS."""

    kind = "bytes"
    vocab_size = 259
    pad_id: int | None = 256
    bos_id: int | None = 257
    eos_id: int | None = 258

    def __init__(self) -> None:
        self.fingerprint = fingerprint(self, b"bytes")

    def encode(self, text: str) -> np.ndarray:
        """See ``Tokenizer.encode``."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """See ``Tokenizer.encode_batch``."""
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """See ``Tokenizer.encode_spans``: one byte each."""
        ids = self.encode(text)
        return ids, np.ones(len(ids), np.int64)

    def special_id(self, name: str) -> int | None:
        """See ``Tokenizer.special_id``: its three have no names."""
        return None

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """See ``Tokenizer.decode``; ids past the bytes are dropped."""
        values = np.asarray(ids, np.int64).reshape(-1)
        return bytes(values[(values >= 0) & (values < 256)].astype(np.uint8)).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json``; BOS, EOS and PAD are looked up by name, and are None where the file has none.

    A ``tokenizer_config.json`` beside it has the first word on those names.
    """

    kind = "huggingface"

    def __init__(self, path: str):
        file = Path(path)
        if not file.is_file():
            raise UserError(f"data.tokenizer.path: no file {path}")
        self._tokenizer = _load(file)
        # Text of the user may spell "</s>": it is text, never the token. Cutting and padding is the packer's business.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise UserError(f"{path}: the tokenizer has no vocabulary")
        if self.vocab_size > _MOST_IDS:
            raise UserError(f"{path}: token id {self.vocab_size - 1} does not fit 32 bits; the file is damaged")
        self._added = {token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items()}
        self.bos_id, self.eos_id, self.pad_id = find_specials(file, self._added)
        self.fingerprint = fingerprint(self, file.read_bytes())

    def encode(self, text: str) -> np.ndarray:
        """See ``Tokenizer.encode``."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """See ``Tokenizer.encode_batch``; without the characters' places, which ``encode_spans`` needs."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """See ``Tokenizer.encode_spans``; what the tokenizer drops counts for the token after it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, np.int32)
        if not len(ids):
            return ids, np.zeros(0, np.int64)
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        width = 1 + (code_points > 0x7F).astype(np.int64) + (code_points > 0x7FF) + (code_points > 0xFFFF)
        before = np.concatenate([[0], np.cumsum(width)])  # [characters + 1]: bytes before each character
        # Several tokens may share one character: the first takes its bytes, so that the sum stays exact.
        ends = before[np.maximum.accumulate(np.asarray([end for _, end in encoding.offsets], np.int64))]
        ends[-1] = before[-1]
        return ids, np.diff(ends, prepend=0)

    def special_id(self, name: str) -> int | None:
        """See ``Tokenizer.special_id``."""
        return self._added.get(name)

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """See ``Tokenizer.decode``; ids outside the vocabulary are dropped."""
        values = np.asarray(ids, np.int64).reshape(-1)
        inside = values[(values >= 0) & (values < self.vocab_size)]
        return self._tokenizer.decode(inside.tolist(), skip_special_tokens=True)


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the config names.

    Raises:
      UserError: missing or broken file, or the extra of its kind (``hf``, ``data``) is not installed.
    """
    if config.kind == "bytes":
        return ByteTokenizer()
    assert config.path is not None  # the config section sees to it
    try:
        if config.kind == "tiktoken":
            from k3train.data.ranks import RanksTokenizer

            return RanksTokenizer(config.path, config.pattern)
        return HuggingFaceTokenizer(config.path)
    except OSError as error:
        raise UserError(f"data.tokenizer.path: {config.path} cannot be read ({error.strerror or error})") from error


def _load(file: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(
            "data.tokenizer.kind: huggingface needs the package tokenizers; install k3train[hf], "
            "or use data.tokenizer.kind: bytes"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every fault of the file
        raise UserError(f"{file}: not a tokenizer.json that the tokenizers library reads ({error})") from error
