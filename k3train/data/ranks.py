"""Tokenizers whose vocabulary is a file of tiktoken's ranks, as Kimi K2 and K3 have it. Imports no JAX.

A line of the file is a token's bytes in base64 and its rank, which is its id. Special tokens have ids past the ranks;
the ``added_tokens_decoder`` of a ``tokenizer_config.json`` beside the file names them. Text never makes them.
"""

import base64
import binascii
import re
from pathlib import Path

import numpy as np

from k3train.config.errors import UserError
from k3train.data.extras import need
from k3train.data.special_tokens import CONFIG, find_specials, fingerprint, read_config

_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        _LETTERS % ("*", "+"),
        _LETTERS % ("+", "*"),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi K2 and K3 cut text: runs of Han, words by case with their English endings, up to three digits, the rest."""

# The published tokenizers cut what is longer than this before anything else, so their ids depend on it.
_MOST_CHARACTERS = 400_000
_MOST_OF_A_KIND = 25_000
_RUN = re.compile(rf"\s{{{_MOST_OF_A_KIND}}}(?=\s)|\S{{{_MOST_OF_A_KIND}}}(?=\S)")


class RanksTokenizer:
    """See the module; ``tokenizer.Tokenizer`` says what each method gives."""

    kind = "tiktoken"

    def __init__(self, path: str, pattern: str | None = None):
        """Read the ranks.

        Raises:
          UserError: no such file, a broken line, ranks with gaps, a pattern that is none; the library is missing.
        """
        file = Path(path)
        if not file.is_file():
            raise UserError(f"data.tokenizer.path: no file {path}")
        tiktoken = need("tiktoken", "data.tokenizer.kind: tiktoken")
        data = file.read_bytes()
        ranks = read_ranks(path, data)
        self._specials = specials = _specials(file, len(ranks))
        try:
            self._encoding = tiktoken.Encoding(
                file.name, pat_str=pattern or KIMI, mergeable_ranks=ranks, special_tokens=specials
            )
        except ValueError as error:
            raise UserError(f"data.tokenizer.pattern: {pattern!r} is no regular expression ({error})") from error
        self._pattern = pattern or KIMI
        self._plain = len(ranks)
        self._lengths = np.array([len(token) for token in ranks], np.int64)
        self.vocab_size = max([len(ranks), *(id_ + 1 for id_ in specials.values())])
        self.bos_id, self.eos_id, self.pad_id = find_specials(file, specials)
        facts = repr((pattern or KIMI, sorted(specials.items()))).encode()
        self.fingerprint = fingerprint(self, data + facts)

    def encode(self, text: str) -> np.ndarray:
        """See ``Tokenizer.encode``.

        Raises:
          UserError: the pattern does not match all of the text; the library leaves out what it does not.
        """
        parts = [self._encoding.encode_ordinary(part) for part in cut(text)]
        ids = np.asarray(parts[0] if len(parts) == 1 else [id_ for part in parts for id_ in part], np.int32)
        if (kept := int(self._lengths[ids].sum())) != (size := len(text.encode("utf-8"))):
            self._refuse_loss(text, ids, size - kept)
        return ids

    def _refuse_loss(self, text: str, ids: np.ndarray, lost: int) -> None:
        kept = self.decode(ids)
        at = next((i for i, (a, b) in enumerate(zip(text, kept, strict=False)) if a != b), len(kept))
        raise UserError(
            f"data.tokenizer.pattern: {self._pattern!r} does not match {text[at : at + 20]!r}, so {lost} bytes of "
            r"a text would be lost; let it match all text, as one that ends with |[\s\S] does"
        )

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """See ``Tokenizer.encode_batch``."""
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """See ``Tokenizer.encode_spans``; a token's bytes are known."""
        ids = self.encode(text)
        return ids, self._lengths[ids]

    def special_id(self, name: str) -> int | None:
        """See ``Tokenizer.special_id``."""
        return self._specials.get(name)

    def decode(self, ids: np.ndarray | list[int]) -> str:
        """See ``Tokenizer.decode``; special ids and those outside the vocabulary are dropped."""
        values = np.asarray(ids, np.int64).reshape(-1)
        inside = values[(values >= 0) & (values < self._plain)]
        return self._encoding.decode_bytes(inside.tolist()).decode("utf-8", errors="replace")


def cut(text: str) -> list[str]:
    """Parts of at most 400,000 characters, and within them no run of more than 25,000 white or other characters.

    The library's regular expressions overflow their stack on much longer ones.
    """
    if len(text) <= _MOST_OF_A_KIND:
        return [text]
    parts = []
    for start in range(0, len(text), _MOST_CHARACTERS):
        part, at = text[start : start + _MOST_CHARACTERS], 0
        for run in _RUN.finditer(part):
            parts.append(part[at : run.end()])
            at = run.end()
        parts.append(part[at:])
    return parts


def read_ranks(path: str, data: bytes) -> dict[bytes, int]:
    """Ranks by token, in their order: 0, 1, 2 and so on, all 256 bytes among them.

    Raises:
      UserError: naming the line.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise UserError(f"{path}: line {number} is no token in base64 and its rank ({error})") from error
        if int(rank) != len(ranks) - 1:
            raise UserError(f"{path}: line {number}: rank {int(rank)}, where {len(ranks) - 1} follows; a damaged file")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise UserError(f"{path}: no token for the single byte 0x{missing:02x}; a truncated file")
    return ranks


def _specials(file: Path, ranks: int) -> dict[str, int]:
    """Special tokens by name, from the ``added_tokens_decoder`` beside the ranks."""
    entries = read_config(file).get("added_tokens_decoder", {})
    try:
        named = {str(entry["content"]): int(id_) for id_, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file.with_name(CONFIG)}: added_tokens_decoder is broken ({error!r})") from error
    for name, id_ in named.items():
        if not ranks <= id_ < 2**31:
            raise UserError(
                f"{file.with_name(CONFIG)}: {name!r} has id {id_}, and the ids of {file.name} end at {ranks - 1}"
            )
    return named
