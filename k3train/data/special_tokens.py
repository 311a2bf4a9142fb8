"""What tokenizers of every kind share: how BOS, EOS and padding are named, and the fingerprint. Imports no JAX."""

import hashlib
import json
from pathlib import Path
from typing import Any

from k3train.config.errors import UserError

PROBE = "Naïve café №5:\n\tdef f(x):  return x**2 - 0x1F  # 你好, мир — 1,234.50 🙂\r\n</s><|endoftext|>"
"""Fixed text whose ids are part of a fingerprint: a library that encodes otherwise is another tokenizer."""

CONFIG = "tokenizer_config.json"

# Spellings by which public tokenizers name these tokens; the first one found is taken.
_USUAL = {
    "bos_token": ("<s>", "<bos>", "[BOS]", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "<|begin▁of▁sentence|>"),
    "eos_token": ("</s>", "<eos>", "[EOS]", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "<|end▁of▁sentence|>"),
    "pad_token": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
}


def find_specials(file: Path, added: dict[str, int]) -> tuple[int | None, int | None, int | None]:
    """Ids of BOS, EOS and padding: those that a ``tokenizer_config.json`` beside ``file`` names, else the usual ones.

    Args:
      file: the tokenizer's file.
      added: its special tokens, by name.

    Raises:
      UserError: one that is named is none of them.
    """
    entries = read_config(file)
    found = []
    for key, usual in _USUAL.items():
        value = entries.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str) and name not in added:
            raise UserError(
                f"{file.with_name(CONFIG)}: {key} is {name!r}, none of the added tokens of {file.name}; "
                "mend the name, or bring the file that belongs to it"
            )
        known = (name,) if isinstance(name, str) else usual
        found.append(next((added[spelling] for spelling in known if spelling in added), None))
    return found[0], found[1], found[2]


def read_config(file: Path) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside a tokenizer's file; empty where there is none.

    Raises:
      UserError: it is broken.
    """
    config = file.with_name(CONFIG)
    if not config.is_file():
        return {}
    try:
        entries = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: not JSON ({error}); mend it or move it away") from error
    if not isinstance(entries, dict):
        raise UserError(f"{config}: not a JSON object of names; mend it or move it away")
    return entries


def fingerprint(tokenizer: Any, files: bytes) -> str:
    """sha256 over a tokenizer's files, its special ids and its encoding of ``PROBE``."""
    digest = hashlib.sha256(hashlib.sha256(files).digest())
    digest.update(repr((tokenizer.kind, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)).encode())
    digest.update(tokenizer.encode(PROBE).astype("<i4").tobytes())
    return digest.hexdigest()
