"""Fill-in-the-middle: some documents are stored as prefix, suffix, middle, so that the middle is learned last. No JAX.

After Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022): a document is cut at two
places drawn uniformly, and stored as

    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle      (the paper's second variant, also StarCoder's)

BOS and EOS stay outermost. What becomes of a document follows from its text and the seed alone, whatever the workers
and the order.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from k3train.config.errors import UserError
from k3train.data.config import FillInMiddleConfig
from k3train.data.header import FillInMiddleHeader, Header
from k3train.data.special_tokens import PROBE
from k3train.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Draw:
    """What becomes of one document."""

    is_spm: bool
    places: tuple[int, int]
    """Two numbers of 64 bits: the cuts, as fractions of 2^64."""

    def cuts(self, size: int) -> tuple[int, int]:
        """Two of the ``size + 1`` places before, between and after ``size`` things, in order."""
        first, second = sorted(place * (size + 1) >> 64 for place in self.places)
        return first, second


class FillInMiddle:
    """The transformation that a config asks for, with the tokenizer's ids.

    Raises:
      UserError: the tokenizer lacks one of the special tokens, two are the same, or its ids of parts do not join.
    """

    def __init__(self, config: FillInMiddleConfig, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        self.prefix, self.middle, self.suffix = (
            _special(tokenizer, f"{what}_token", getattr(config, f"{what}_token"))
            for what in ("prefix", "middle", "suffix")
        )
        taken = [self.prefix, self.middle, self.suffix, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
        known = [id_ for id_ in taken if id_ is not None]
        if len(set(taken[:3])) < 3 or len(set(known)) < 3 + len({*known[3:]}):
            raise UserError(
                "data.fill_in_middle: prefix_token, middle_token and suffix_token must be three tokens that are not "
                f"BOS, EOS or padding; their ids are {self.prefix}, {self.middle} and {self.suffix}"
            )
        if config.boundaries == "character":
            check_joins(tokenizer, "data.fill_in_middle.boundaries", "set boundaries: token")

    @property
    def ids(self) -> tuple[int, int, int]:
        """Of prefix, middle and suffix; text makes none of them, or is refused."""
        return self.prefix, self.middle, self.suffix

    @property
    def header(self) -> FillInMiddleHeader:
        """What the store's header says of it."""
        ids = {"prefix_id": self.prefix, "middle_id": self.middle, "suffix_id": self.suffix}
        return FillInMiddleHeader.model_validate(self.config.model_dump() | ids)

    def texts(self, text: str, digest: bytes) -> list[str]:
        """What the tokenizer is to encode of a document: the text, or its prefix, middle and suffix.

        Args:
          text: of the document.
          digest: its sha256.
        """
        draw = self._draw(digest)
        if draw is None or self.config.boundaries == "token":
            return [text]
        first, second = draw.cuts(len(text))
        return [text[:first], text[first:second], text[second:]]

    def join(self, parts: list[np.ndarray], digest: bytes) -> np.ndarray:
        """Ids as they are stored, int32 [n], without BOS and EOS.

        Args:
          parts: ids of what ``texts`` gave.
          digest: sha256 of the text.
        """
        draw = self._draw(digest)
        if draw is None:
            return parts[0]
        if len(parts) == 1:
            parts = np.split(parts[0], draw.cuts(len(parts[0])))
        prefix, middle, suffix = parts
        before, between, after = ([id_] for id_ in (self.prefix, self.suffix, self.middle))
        if draw.is_spm:
            stored = [before, between, suffix, after, prefix, middle]
        else:
            stored = [before, prefix, between, suffix, after, middle]
        return np.concatenate(stored).astype(np.int32)

    def _draw(self, digest: bytes) -> _Draw | None:
        """None where the document stays as it is."""
        key = b"fill in the middle" + self.config.seed.to_bytes(8, "little") + digest
        words = np.frombuffer(hashlib.sha256(key).digest(), ">u8").tolist()
        if words[0] >= self.config.rate * 2.0**64:
            return None
        return _Draw(words[1] < self.config.spm_rate * 2.0**64, (words[2], words[3]))


def restored(ids: np.ndarray, header: Header) -> np.ndarray:
    """The ids of a stored document in the order of its text, without the three tokens; others stay as they are.

    Args:
      ids: int [n], BOS and EOS included where the store adds them.
      header: of the store.
    """
    made = header.fill_in_middle
    if made is None:
        return ids
    places = [np.flatnonzero(ids == id_) for id_ in (made.prefix_id, made.suffix_id, made.middle_id)]
    if any(len(found) != 1 for found in places):
        return ids
    prefix, suffix, middle = (int(found[0]) for found in places)
    # EOS follows the middle, and so would the suffix.
    end = len(ids) - header.add_eos
    return np.concatenate(
        [ids[:prefix], ids[prefix + 1 : suffix], ids[middle + 1 : end], ids[suffix + 1 : middle], ids[end:]]
    )


def _special(tokenizer: Tokenizer, key: str, name: str) -> int:
    id_ = tokenizer.special_id(name)
    if id_ is not None:
        return id_
    if tokenizer.kind == "bytes":
        cure = "the tokenizer of kind: bytes has no tokens to spare; take kind: huggingface or tiktoken"
    else:
        cure = "the tokenizer has no added token of that name; name those that it has, or bring one that has them"
    raise UserError(f"data.fill_in_middle.{key}: {name!r}: {cure}")


def check_joins(tokenizer: Tokenizer, key: str, cure: str) -> None:
    """Raise UserError, naming ``key``, where text that is encoded in parts does not come back as the whole does."""
    whole = tokenizer.decode(tokenizer.encode(PROBE))
    for at in range(1, len(PROBE) - 1, 7):
        parts = [tokenizer.encode(part) for part in (PROBE[:at], PROBE[at : at + 3], PROBE[at + 3 :])]
        if tokenizer.decode(np.concatenate(parts)) != whole:
            raise UserError(
                f"{key}: this tokenizer adds or drops something where a text begins (a space, most often), so parts "
                f"of a document do not make the whole; {cure}"
            )


def stored_names(made: FillInMiddleHeader | None) -> dict[int | None, str]:
    """How a person is shown the three tokens, by id."""
    return {} if made is None else {made.prefix_id: "‹prefix›", made.middle_id: "‹middle›", made.suffix_id: "‹suffix›"}
