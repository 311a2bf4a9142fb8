import builtins
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.data.config import TokenizerConfig
from k3train.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer

TEXT = "the quick brown fox, наверное 🙂 naïve "


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    """A small byte-level BPE with <s>, </s> and <pad>."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 20], trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=10)
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@given(st.binary())
def test_bytes_round_trip_any_bytes(data):
    tokenizer = ByteTokenizer()
    text = tokenizer.decode(np.frombuffer(data, np.uint8).astype(np.int32))
    assert text == data.decode("utf-8", errors="replace")
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text


def test_bytes_specials():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (259, 256, 257, 258)
    assert tokenizer.decode([257, 104, 105, 258, 256, 300, -1]) == "hi"
    assert tokenizer.decode([0xE4, 0xBD]) == "�"
    assert tokenizer.fingerprint == ByteTokenizer().fingerprint


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_huggingface_round_trip(tokenizer_file, text):
    tokenizer = HuggingFaceTokenizer(str(tokenizer_file))
    ids, token_bytes = tokenizer.encode_spans(text)
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(ids, tokenizer.encode(text))
    assert len(token_bytes) == len(ids)
    assert token_bytes.sum() == len(text.encode())
    assert (token_bytes >= 0).all()


def test_huggingface_never_makes_specials_of_text(tokenizer_file):
    tokenizer = HuggingFaceTokenizer(str(tokenizer_file))
    text = "a</s>b<s><pad>"
    ids = tokenizer.encode(text)
    assert not {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id} & set(ids.tolist())
    assert tokenizer.decode(ids) == text


def test_huggingface_ids_and_stored_cutting_is_off(tokenizer_file):
    tokenizer = HuggingFaceTokenizer(str(tokenizer_file))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == len(json.loads(tokenizer_file.read_text())["model"]["vocab"])
    assert len(tokenizer.encode("zzzzzzzzzz qqqq")) > 4
    assert len(tokenizer.encode("z")) == 1
    assert tokenizer.decode([1, 5000, -3, 2]) == ""


def test_huggingface_names_from_the_sidecar(tokenizer_file, tmp_path):
    plain = HuggingFaceTokenizer(str(tokenizer_file))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<pad>"}}))
    named = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))
    assert named.eos_id == 0
    assert named.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "tokenizer_config.json: not a JSON object of names"),
        ("null", "tokenizer_config.json: not a JSON object of names"),
        ('{"bos_token": "<nope>"}', "bos_token is '<nope>', none of the added tokens of tokenizer.json"),
        ('{"eos_token": {"content": "e"}}', "eos_token is 'e', none of the added tokens"),
    ],
)
def test_huggingface_sidecars_that_do_not_fit(tokenizer_file, tmp_path, content, says):
    """Another token is never taken silently."""
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match=says):
        load_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "tokenizer.json")))


def test_huggingface_ids_beyond_32_bits(tokenizer_file, tmp_path):
    content = json.loads(tokenizer_file.read_text())
    content["model"]["vocab"]["x" * 9] = 2**31
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="token id 2147483648 does not fit 32 bits"):
        load_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "tokenizer.json")))


def test_huggingface_file_that_cannot_be_looked_at(tokenizer_file, tmp_path, as_nobody):
    (tmp_path / "closed").mkdir(mode=0o700)
    with as_nobody(), pytest.raises(UserError, match=r"data.tokenizer.path: .* cannot be read .Permission denied"):
        load_tokenizer(TokenizerConfig(kind="huggingface", path=str(tmp_path / "closed" / "tokenizer.json")))


def test_huggingface_without_specials_says_none(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "u": 2}, unk_token="u")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)


def test_fingerprints_differ(tokenizer_file, tmp_path):
    changed = json.loads(tokenizer_file.read_text())
    changed["model"]["merges"] = changed["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    prints = {HuggingFaceTokenizer(str(path)).fingerprint for path in (tokenizer_file, tmp_path / "tokenizer.json")}
    assert len(prints | {ByteTokenizer().fingerprint}) == 3


@pytest.mark.parametrize(("content", "says"), [(None, "no file"), ("{}", "not a tokenizer.json")])
def test_missing_or_broken_file(tmp_path, content, says):
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=says):
        load_tokenizer(TokenizerConfig(kind="huggingface", path=str(file)))


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.delitem(sys.modules, "tokenizers", raising=False)
    real = builtins.__import__

    def no_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_tokenizers)
    with pytest.raises(UserError, match=r"k3train\[hf\]"):
        load_tokenizer(TokenizerConfig(kind="huggingface", path=str(file)))
