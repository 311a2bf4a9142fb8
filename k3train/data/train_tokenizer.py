"""A byte-level BPE tokenizer trained on the configured sources, through the ``tokenizers`` library. Imports no JAX.

Text is cut as Kimi K2 and K3 cut it, so that no token crosses a word. Held-out documents are left out. The same sources
give the same file, byte for byte.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.storage import write_whole
from k3train.data.config import DataConfig
from k3train.data.corpora import get_corpus, locate
from k3train.data.extras import need
from k3train.data.files import find_files
from k3train.data.ranks import KIMI
from k3train.data.records import BadRecord, Fields
from k3train.data.sources import Piece, read_piece
from k3train.data.special_tokens import CONFIG
from k3train.data.writer import is_held_out

SPECIALS = {"bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}


def train_tokenizer(
    config: DataConfig,
    vocab_size: int,
    out: Path,
    most_bytes: int,
    say: Callable[[str], None] = print,
    more_specials: tuple[str, ...] = (),
) -> Path:
    """Train and write ``out`` (a tokenizer.json), with a tokenizer_config.json beside it.

    Args:
      config: the data section; its source is read, its tokenizer is not.
      vocab_size: ids in all, special ones included; fewer where the text has no more pairs.
      out: the file.
      most_bytes: UTF-8 bytes of text to learn from, the first ones of the sources.
      say: receives lines for a person.
      more_specials: names of further special tokens, as ``data.fill_in_middle`` needs them; they follow the three.

    Raises:
      UserError: bad input (as in ``prepare``), no text, too few ids, or the library is missing.
    """
    specials = [*SPECIALS.values(), *more_specials]
    if len(set(specials)) < len(specials) or "" in specials:
        raise UserError(f"--special-token: {', '.join(more_specials)}: each needs a name that no other token has")
    if vocab_size < 256 + len(specials):
        raise UserError(
            f"--vocab-size {vocab_size}: 256 bytes and {len(specials)} special tokens need {256 + len(specials)}"
        )
    if config.source is None or config.source.kind != "text":
        raise UserError("data.source: a tokenizer is trained on text; name a corpus or files of kind: text")
    for file in (out, out.with_name(CONFIG)):
        if file.exists():
            raise UserError(
                f"{file}: there is one already, and {CONFIG} is written beside the tokenizer; move it away, or name "
                "another folder with --out"
            )
    library = need("tokenizers", "data train-tokenizer", extra="hf")
    tokenizer = library.Tokenizer(library.models.BPE())
    cut = library.pre_tokenizers.Split(library.Regex(KIMI), behavior="isolated")
    level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([cut, level])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    taken = {"documents": 0, "bytes": 0}
    tokenizer.train_from_iterator(_texts(config, most_bytes, taken, say), trainer)
    if not taken["documents"]:
        raise UserError("data.source: no document to learn from")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out.with_name(CONFIG), json.dumps(SPECIALS, indent=1) + "\n")
    write_whole(out, tokenizer.to_str(pretty=True) + "\n")
    say(
        f"{out}: {tokenizer.get_vocab_size()} ids, learned from {taken['documents']:,} documents "
        f"({taken['bytes']:,} bytes)"
    )
    return out


def _texts(config: DataConfig, most_bytes: int, taken: dict[str, int], say: Callable[[str], None]) -> Iterator[str]:
    source = config.source
    assert source is not None
    if source.corpus is not None:
        paths = [str(locate(get_corpus(source.corpus), say))]
    else:
        paths = find_files(source.files)
    fields = Fields(source.text_field, (), source.max_document_bytes, source.prompt_field)
    for record in read_piece(Piece(tuple(range(len(paths)))), paths, fields, source.corpus):
        if isinstance(record, BadRecord):
            if source.on_bad_record == "error":
                raise UserError(f"{record}. Mend the file, or set data.source.on_bad_record: skip")
            continue
        data = record.text.encode("utf-8")
        if is_held_out(hashlib.sha256(data).digest(), config.holdout):
            continue
        if taken["bytes"] + len(data) > most_bytes:
            return
        taken["documents"] += 1
        taken["bytes"] += len(data)
        yield record.text
