import hashlib
import json

import pytest

from k3train.cli.main import main
from k3train.config.errors import UserError
from k3train.data.prepare import prepare
from k3train.data.tokenizer import HuggingFaceTokenizer
from k3train.data.train_tokenizer import train_tokenizer
from k3train.data.writer import is_held_out

from .conftest import quiet


def test_the_same_sources_give_the_same_file(text_files, texts, make_config, tmp_path):
    config = make_config(text_files, holdout=0.2)
    files = [train_tokenizer(config, 320, tmp_path / name / "tokenizer.json", 1 << 20, quiet) for name in "ab"]
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = HuggingFaceTokenizer(str(files[0]))
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (320, 0, 1, 2)
    for text in texts:
        ids, spans = tokenizer.encode_spans(text)
        assert tokenizer.decode(ids) == text and spans.sum() == len(text.encode())
        assert len(ids) < len(text.encode()) or len(text) < 4
    made = prepare(
        make_config(text_files, tokenizer={"kind": "huggingface", "path": str(files[0])}, store=str(tmp_path / "s")),
        say=quiet,
    )
    assert made.header.tokenizer.bos_id == 0
    # K2's cut: no token crosses a word, and digits come three at a time.
    vocabulary = json.loads(files[0].read_text())["model"]["vocab"]
    assert not [token for token in vocabulary if "Ġ" in token[1:] and token.strip("Ġ")]


def test_held_out_text_is_not_learned_from(make_config, tmp_path):
    texts = [f"{word} {word}{word}" for word in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    held = [text for text in texts if is_held_out(hashlib.sha256(text.encode()).digest(), 0.5)]
    assert 0 < len(held) < len(texts)
    said = []
    file = train_tokenizer(
        make_config([tmp_path / f"{i}.txt" for i in range(8)], holdout=0.5),
        999,
        tmp_path / "t.json",
        1 << 20,
        said.append,
    )
    vocabulary = json.loads(file.read_text())["model"]["vocab"]
    for text in texts:
        assert (text.split()[0] in vocabulary) == (text not in held)
    assert said[-1].endswith(
        f"learned from {8 - len(held)} documents ({sum(len(t) for t in texts if t not in held)} bytes)"
    )


@pytest.mark.parametrize(
    ("changes", "size", "most", "says"),
    [
        ({}, 258, 1 << 20, "--vocab-size 258: 256 bytes and 3 special tokens need 259"),
        ({}, 300, 0, "no document to learn from"),
        ({"source": None}, 300, 1, "a tokenizer is trained on text"),
        ({"source": {"files": ["*.none"]}}, 300, 1, "no file matches"),
    ],
)
def test_what_cannot_be_trained(text_files, make_config, tmp_path, changes, size, most, says):
    config = make_config(**{"source": {"files": [str(file) for file in text_files]}} | changes)
    with pytest.raises(UserError, match=says):
        train_tokenizer(config, size, tmp_path / "tokenizer.json", most, quiet)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_bad_record_stops_it_as_it_stops_prepare(make_config, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nno json\n')
    with pytest.raises(UserError, match=r"a.jsonl: line 2, byte 14: broken JSON"):
        train_tokenizer(make_config([tmp_path / "a.jsonl"]), 300, tmp_path / "tokenizer.json", 100, quiet)
    (tmp_path / "tokenizer.json").write_text("mine")
    with pytest.raises(UserError, match="there is one already"):
        train_tokenizer(make_config([tmp_path / "a.jsonl"]), 300, tmp_path / "tokenizer.json", 100, quiet)


def test_the_command(text_files, tmp_path, capsys, root, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = f"extends: {root}/configs/experiments/quickstart.yaml\n"
    (tmp_path / "e.yaml").write_text(experiment)
    pattern = "data.source.corpus=null", f"data.source.files=[{text_files[0].parent}/*.txt]"
    arguments = ["data", "train-tokenizer", "e.yaml", *pattern, "--vocab-size", "300", "--out", "t/tokenizer.json"]
    assert main(arguments) == 0
    assert "t/tokenizer.json: 300 ids, learned from" in capsys.readouterr().out


def test_a_tokenizer_config_is_left_alone(text_files, make_config, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("mine")
    with pytest.raises(UserError, match=r"tokenizer_config.json: there is one already, and .* is written beside"):
        train_tokenizer(make_config(text_files), 300, tmp_path / "tokenizer.json", 1 << 20, quiet)
    assert (tmp_path / "tokenizer_config.json").read_text() == "mine"
    assert not (tmp_path / "tokenizer.json").exists()


def test_more_special_tokens_serve_fill_in_middle(text_files, make_config, tmp_path):
    names = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    config = make_config(text_files)
    file = train_tokenizer(config, 320, tmp_path / "tokenizer.json", 1 << 20, quiet, names)
    tokenizer = {"kind": "huggingface", "path": str(file)}
    store = prepare(make_config(text_files, tokenizer=tokenizer, fill_in_middle={"rate": 1.0}), say=quiet)
    made = store.header.fill_in_middle
    assert made is not None and (made.prefix_id, made.middle_id, made.suffix_id) == (3, 4, 5)
    assert all((store.train.document(i) == 4).sum() == 1 for i in range(store.train.documents))
    for wrong in (("[EOS]",), ("a", "a"), ("",)):
        with pytest.raises(UserError, match="each needs a name that no other token has"):
            train_tokenizer(config, 320, tmp_path / "other" / "tokenizer.json", 1 << 20, quiet, wrong)
