import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.data.config import DataConfig, FillInMiddleConfig
from k3train.data.fill_in_middle import FillInMiddle, restored
from k3train.data.holdout import holdout_batches
from k3train.data.ngram import evaluate_ngram
from k3train.data.prepare import ensure_store, prepare
from k3train.data.store import Store
from k3train.data.tokenizer import load_tokenizer

from .conftest import WORDS, quiet

tokenizers = pytest.importorskip("tokenizers")
SPECIALS = ["<pad>", "<s>", "</s>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
PREFIX, MIDDLE, SUFFIX = 3, 4, 5


def write_tokenizer(file: Path, **options) -> Path:
    """A byte-level BPE with the tokens of StarCoder."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=options.get("prefix_space", False))
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=options.get("specials", SPECIALS),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([" ".join(WORDS) * 20], trainer)
    made.save(str(file))
    return file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """400 documents, some of them one character long or with text at which tokenizers stumble."""
    random = np.random.default_rng(3)
    texts = ["x", "🙂", "a\r\nb", " lead", "trail ", "e\u0301", "</s><|fim|>"]
    texts += [f"{i} " + " ".join(random.choice(WORDS, random.integers(1, 60))) for i in range(393)]
    folder = tmp_path_factory.mktemp("middle")
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    write_tokenizer(folder / "tokenizer.json")
    return folder


def config_of(corpus: Path, store: Path, workers: int = 1, tokenizer: str = "tokenizer.json", **middle) -> DataConfig:
    values = {
        "store": str(store),
        "sequence_length": 32,
        "holdout": 0.2,
        "tokenizer": {"kind": "huggingface", "path": str(corpus / tokenizer)},
        "source": {"files": [str(corpus / "a.jsonl")], "workers": workers},
        "fill_in_middle": middle,
    }
    return DataConfig.model_validate(values)


@pytest.fixture(scope="module")
def made(corpus, tmp_path_factory) -> Store:
    return prepare(config_of(corpus, tmp_path_factory.mktemp("made") / "store"), say=quiet)


def documents(split) -> list[np.ndarray]:
    return [split.document(i) for i in range(split.documents)]


def texts_of(store: Store, tokenizer) -> list[str]:
    found = [tokenizer.decode(restored(ids, store.header)) for ids in documents(store.train)]
    return sorted(found + [tokenizer.decode(ids) for ids in documents(store.holdout)])


@pytest.mark.parametrize("boundaries", ["character", "token"])
@pytest.mark.parametrize("spm_rate", [0.0, 0.5, 1.0])
def test_every_document_comes_back_exactly(corpus, tmp_path, boundaries, spm_rate):
    config = config_of(corpus, tmp_path / "store", rate=1.0, spm_rate=spm_rate, boundaries=boundaries)
    store, tokenizer = prepare(config, say=quiet), load_tokenizer(config.tokenizer)
    wanted = sorted(json.loads(line)["text"] for line in (corpus / "a.jsonl").read_text("utf-8").splitlines())
    assert texts_of(store, tokenizer) == wanted
    for ids in documents(store.train):
        assert (ids[0], ids[-1]) == (1, 2) and not np.isin(ids[1:-1], [0, 1, 2]).any()
        assert ids[1] == PREFIX and [int((ids == i).sum()) for i in (PREFIX, SUFFIX, MIDDLE)] == [1, 1, 1]
        prefix, suffix, middle = (int(np.flatnonzero(ids == i)[0]) for i in (PREFIX, SUFFIX, MIDDLE))
        assert prefix < suffix < middle and (spm_rate < 1 or suffix == prefix + 1)
        if boundaries == "token":
            plain = restored(ids, store.header)
            np.testing.assert_array_equal(plain[1:-1], tokenizer.encode(tokenizer.decode(plain)))
    if spm_rate == 0:
        assert np.mean([ids[2] == SUFFIX for ids in documents(store.train)]) < 0.1  # an empty prefix is rare


def test_shares_are_near_their_rates_and_the_held_out_side_is_as_its_text(corpus, made, tmp_path):
    tokens = documents(made.train)
    changed = [ids for ids in tokens if (ids == PREFIX).any()]
    assert abs(len(changed) / len(tokens) - 0.5) < 4 * (0.25 / len(tokens)) ** 0.5
    first = np.mean([ids[2] == SUFFIX for ids in changed])
    assert abs(first - 0.5) < 0.2
    assert not any(np.isin(ids, [PREFIX, MIDDLE, SUFFIX]).any() for ids in documents(made.holdout))
    plain = prepare(config_of(corpus, tmp_path / "store").model_copy(update={"fill_in_middle": None}), say=quiet)
    for name in ("tokens-00000.bin", "token_bytes.bin", "doc_offsets.bin"):
        assert (made.holdout.folder / name).read_bytes() == (plain.holdout.folder / name).read_bytes()
    assert holdout_batches(made, 32, 4).source_bytes == holdout_batches(plain, 32, 4).source_bytes
    assert made.header.train.source_bytes == plain.header.train.source_bytes
    assert made.fingerprint != plain.fingerprint
    tokenizer = load_tokenizer(config_of(corpus, tmp_path).tokenizer)
    assert evaluate_ngram(made, tokenizer) == evaluate_ngram(plain, tokenizer)


def test_cuts_are_uniform_over_all_places():
    class Bytes:
        kind, bos_id, eos_id, pad_id = "huggingface", 1, 2, 0

        def special_id(self, name):
            return SPECIALS.index(name)

        def encode(self, text):
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32) + 100

        def decode(self, ids):
            return bytes((np.asarray(ids) - 100).astype(np.uint8)).decode(errors="replace")

    middle = FillInMiddle(FillInMiddleConfig(rate=1.0), Bytes())  # pyright: ignore[reportArgumentType]
    counts = np.zeros((4, 4), int)
    for i in range(6000):
        parts = middle.texts("abc", hashlib.sha256(str(i).encode()).digest())
        assert "".join(parts) == "abc"
        counts[len(parts[0]), len(parts[0]) + len(parts[1])] += 1
    wanted = 6000 * (2 * np.triu(np.ones((4, 4))) - np.eye(4)) / 16
    assert (np.abs(counts - wanted) < 5 * np.sqrt(wanted + 1e-9)).all() and (np.tril(counts, -1) == 0).all()


def test_workers_and_pieces_change_no_byte(corpus, made, tmp_path):
    other = prepare(config_of(corpus, tmp_path / "store", workers=2), say=quiet, piece_bytes=9000)
    for file in made.path.rglob("*"):
        if file.is_file():
            assert (other.path / file.relative_to(made.path)).read_bytes() == file.read_bytes(), file


def test_a_document_is_drawn_by_its_text_and_the_seed(corpus, made, tmp_path):
    other = prepare(config_of(corpus, tmp_path / "store", seed=1), say=quiet)
    changed = [[(ids == PREFIX).any() for ids in documents(store.train)] for store in (made, other)]
    assert changed[0] != changed[1] and made.train.documents == other.train.documents


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rate": 0.25}, "data.fill_in_middle.rate: the store has 0.5, the config says 0.25"),
        ({"seed": 3}, "data.fill_in_middle.seed: the store has 0, the config says 3"),
        (None, "data.fill_in_middle.spm_rate: the store has 0.5, the config says None"),
    ],
)
def test_a_store_made_otherwise_is_refused(corpus, made, change, says):
    config = config_of(corpus, made.path).model_copy(
        update={"fill_in_middle": None if change is None else FillInMiddleConfig(**change)}
    )
    with pytest.raises(UserError, match=says):
        ensure_store(config, say=quiet)
    ensure_store(config_of(corpus, made.path), say=quiet)


def test_tokens_that_do_not_serve(corpus, tmp_path):
    for change, says in (
        ({"prefix_token": "<PRE>"}, "prefix_token: '<PRE>': the tokenizer has no added token of that name"),
        ({"prefix_token": "<fim_middle>"}, "must be three tokens"),
        ({"suffix_token": "</s>"}, "that are not BOS, EOS or padding"),
    ):
        with pytest.raises(UserError, match=says):
            values = config_of(corpus, tmp_path / "store").model_dump() | {"fill_in_middle": change}
            prepare(DataConfig.model_validate(values), say=quiet)
    config = config_of(corpus, tmp_path / "store").model_dump() | {"tokenizer": {"kind": "bytes"}}
    with pytest.raises(UserError, match="kind: bytes has no tokens to spare"):
        prepare(DataConfig.model_validate(config), say=quiet)
    assert not (tmp_path / "store").exists()


def test_a_tokenizer_that_puts_a_space_before_text(corpus, tmp_path):
    write_tokenizer(corpus / "space.json", prefix_space=True)
    config = config_of(corpus, tmp_path / "store", tokenizer="space.json")
    with pytest.raises(UserError, match="set boundaries: token"):
        prepare(config, say=quiet)
    config = config_of(corpus, tmp_path / "store", tokenizer="space.json", boundaries="token", rate=1.0)
    store = prepare(config, say=quiet)
    assert all((ids == MIDDLE).sum() == 1 for ids in documents(store.train))


def test_text_that_spells_a_token_is_a_bad_record(corpus, tmp_path):
    """Of added tokens that are not special ones, text can make ids."""
    entries = json.loads((corpus / "tokenizer.json").read_text())
    for token in entries["added_tokens"]:
        token["special"] = token["content"] not in SPECIALS[3:]
    (tmp_path / "tokenizer.json").write_text(json.dumps(entries))
    (tmp_path / "a.jsonl").write_text('{"text": "row token"}\n{"text": "see <fim_middle> here"}\n')
    with pytest.raises(UserError, match=r"a.jsonl: line 2, byte \d+: special token: its text spells a token of"):
        prepare(config_of(tmp_path, tmp_path / "store", rate=0.0), say=quiet)  # a cut may fall into the name
    config = config_of(corpus, tmp_path / "other", rate=1.0).model_dump()
    config["source"]["files"] = (str(tmp_path / "a.jsonl"),)
    with_special = prepare(DataConfig.model_validate(config | {"holdout": 0.0}), say=quiet)
    assert with_special.train.documents == 2  # special tokens are never made of text


def test_tokens_read_in_place_stay_as_they_are(tmp_path, corpus):
    np.arange(10, dtype="<u2").tofile(tmp_path / "a.bin")
    source = {"kind": "token_array", "token_type": "uint16", "files": [str(tmp_path / "a.bin")]}
    config = config_of(corpus, tmp_path / "store").model_dump() | {"source": source}
    with pytest.raises(UserError, match=r"data\.fill_in_middle: tokens of data\.source\.kind: token_array are read"):
        prepare(DataConfig.model_validate(config), say=quiet)
