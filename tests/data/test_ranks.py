"""tiktoken's ranks: the same ids as a BPE written out plainly, and specials that no text makes."""

import base64
import json
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.data.config import TokenizerConfig
from k3train.data.prepare import prepare
from k3train.data.ranks import KIMI, RanksTokenizer, cut
from k3train.data.tokenizer import load_tokenizer

from .conftest import quiet

MERGES = [b"th", b"the", b" t", b" the", b"'s", b"12", b"123", b"\n\n", b"  ", b"ab", b"ABC", b"AB", b"Ab"]
HAN = "你好".encode()
TOKENS = [bytes([i]) for i in range(256)] + [HAN[:2], HAN[:3], HAN[3:5], HAN[3:], HAN] + MERGES
WORDS = [
    "the",
    "The",
    "ABC",
    "Ab",
    "'s",
    "'LL",
    " ",
    "  ",
    "\n",
    "\r\n",
    "1234",
    "你好",
    "你",
    "é",
    "ß",
    "ǅ",
    "!?",
    "🙂",
]
SPECIALS = {len(TOKENS): "[BOS]", len(TOKENS) + 1: "[EOS]", len(TOKENS) + 255: "[PAD]"}


def lines(tokens) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


@pytest.fixture(scope="module")
def ranks_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("ranks") / "tiktoken.model"
    file.write_bytes(lines(TOKENS))
    config = {"added_tokens_decoder": {str(id_): {"content": name} for id_, name in SPECIALS.items()}}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "[BOS]"}))
    return file


@pytest.fixture(scope="module")
def tokenizer(ranks_file):
    return RanksTokenizer(str(ranks_file))


def plain_bpe(text: str) -> list[int]:
    """The lowest rank of two neighbours is merged until there is none."""
    ids = []
    for piece in regex.findall(f"(?V1){KIMI}", text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [a + b for a, b in pairwise(parts)]
            ranked = [(TOKENS.index(pair), i) for i, pair in enumerate(pairs) if pair in TOKENS]
            if not ranked:
                break
            _, i = min(ranked)
            parts[i : i + 2] = [pairs[i]]
        ids += [TOKENS.index(part) for part in parts]
    return ids


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(WORDS)))
@example(["x's", " the", "12345", "\n \n"])
def test_ids_are_those_of_a_plain_bpe(tokenizer, words):
    text = "".join(words)
    ids, spans = tokenizer.encode_spans(text)
    assert ids.tolist() == plain_bpe(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert spans.sum() == len(text.encode())
    assert not len(ids) or ids.max() < len(TOKENS)


def test_specials_are_named_and_never_made(tokenizer):
    names = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert names == tuple(SPECIALS)
    assert tokenizer.vocab_size == len(TOKENS) + 256
    ids = tokenizer.encode("[BOS]a[EOS]<|endoftext|>[PAD]")
    assert not set(names) & set(ids.tolist())
    assert tokenizer.decode([names[0], 97, names[1], 10**6, -1]) == "a"


def test_a_store_of_ranks(ranks_file, text_files, texts, make_config):
    config = make_config(text_files, tokenizer={"kind": "tiktoken", "path": str(ranks_file)}, holdout=0.2)
    store = prepare(config, say=quiet)
    tokenizer = load_tokenizer(config.tokenizer)
    found = [
        tokenizer.decode(split.document(i)) for split in (store.train, store.holdout) for i in range(split.documents)
    ]
    assert sorted(found) == sorted(texts)
    assert store.train.document(0)[0] == len(TOKENS) and store.train.document(0)[-1] == len(TOKENS) + 1
    assert int(store.holdout.token_bytes.sum()) == store.header.holdout_split.source_bytes


def test_long_text_is_cut_and_whole():
    text = "a" * 60_000 + " " * 25_001 + "bc d" * 110_000
    parts = cut(text)
    assert "".join(parts) == text
    assert [len(part) for part in parts[:5]] == [25_000, 25_000, 10_000 + 25_000, 1 + 314_999, 125_001]
    assert cut("short text") == ["short text"]


def test_a_million_letters_are_encoded(tokenizer):
    assert tokenizer.decode(tokenizer.encode("x" * 1_000_001)) == "x" * 1_000_001


def test_fingerprints(ranks_file, tokenizer, tmp_path):
    assert RanksTokenizer(str(ranks_file)).fingerprint == tokenizer.fingerprint
    other = RanksTokenizer(str(ranks_file), r"\s+|\S+").fingerprint
    (tmp_path / "tiktoken.model").write_bytes(lines(TOKENS))
    bare = RanksTokenizer(str(tmp_path / "tiktoken.model"))
    assert (bare.bos_id, bare.vocab_size) == (None, len(TOKENS))
    assert len({tokenizer.fingerprint, other, bare.fingerprint}) == 3


@pytest.mark.parametrize(
    ("data", "config", "says"),
    [
        (lines(TOKENS[:100]), "{}", "no token for the single byte 0x64; a truncated file"),
        (lines(TOKENS) + b"!!! 300\n", "{}", r"line 275 is no token in base64 and its rank"),
        (lines(TOKENS)[:-4], "{}", r"line 274"),
        (lines(TOKENS) + b"AAAA 900\n", "{}", r"line 275: rank 900, where 274 follows"),
        (lines(TOKENS), '{"bos_token": "<nope>"}', "bos_token is '<nope>', none of the added tokens of"),
        (lines(TOKENS), '{"added_tokens_decoder": {"3": {"content": "<s>"}}}', "'<s>' has id 3, and the ids of"),
        (lines(TOKENS), '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder is broken"),
    ],
)
def test_files_that_do_not_fit(tmp_path, data, config, says):
    (tmp_path / "tiktoken.model").write_bytes(data)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=says):
        load_tokenizer(TokenizerConfig(kind="tiktoken", path=str(tmp_path / "tiktoken.model")))


def test_a_pattern_that_is_none(ranks_file):
    with pytest.raises(UserError, match=r"data.tokenizer.pattern: '\(' is no regular expression"):
        RanksTokenizer(str(ranks_file), "(")


def test_a_pattern_is_for_ranks_only(ranks_file):
    with pytest.raises(ValueError, match=r"tokenizer.pattern is for kind: tiktoken"):
        TokenizerConfig(kind="huggingface", path="tokenizer.json", pattern="x")


@pytest.mark.parametrize("pattern", [r"[a-z]+", r"\S+", r"[^\n]+"])
def test_a_pattern_that_does_not_cover_all_text_is_refused(ranks_file, pattern):
    """The library passes over what it does not match, without a word."""
    with pytest.raises(UserError, match=r"data.tokenizer.pattern: .* does not match .* bytes of a text would be lost"):
        RanksTokenizer(str(ranks_file), pattern)


def test_text_that_only_one_document_has(ranks_file):
    tokenizer = RanksTokenizer(str(ranks_file), r"[^\x00]+")
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    with pytest.raises(UserError, match=r"does not match '\\x00b', so 1 bytes of a text would be lost"):
        tokenizer.encode("a\x00b")
    assert len(RanksTokenizer(str(ranks_file), r"[^\x00]+|[\s\S]").encode("a\x00b")) == 3
