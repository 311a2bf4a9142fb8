"""Tokens that others wrote are read where they lie, as a store of the same documents would be."""

import re

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.data.config import DataConfig
from k3train.data.course import Course
from k3train.data.loader import Loader
from k3train.data.ngram import evaluate_ngram
from k3train.data.pack import Chunks
from k3train.data.prepare import ensure_store, prepare
from k3train.data.store import open_store
from k3train.data.tokenizer import ByteTokenizer

from .conftest import quiet
from .formats import megatron


def ids_of(text: str) -> list[int]:
    return [257, *text.encode(), 258]


def megatron_files(folder, texts, dtype="<u2"):
    """Two files; every second document is of two sequences."""
    documents = [[ids_of(t)] if i % 2 else [ids_of(t)[:1], ids_of(t)[1:]] for i, t in enumerate(texts)]
    megatron(folder / "a.bin", documents[:25], dtype)
    megatron(folder / "b.bin", documents[25:], "<i4")
    return {"kind": "megatron", "files": [f"{folder}/*.bin"]}


def array_files(folder, texts, token_type="uint32"):
    for name, part in (("a.npy", texts[:25]), ("b.npy", texts[25:])):
        ids = [id_ for text in part for id_ in ids_of(text)]
        np.array(ids, token_type).tofile(folder / name)
    return {"kind": "token_array", "files": [f"{folder}/*.npy"], "token_type": token_type, "document_end": 258}


@pytest.mark.parametrize("write", [megatron_files, array_files])
def test_documents_sides_and_counts(texts, tmp_path, make_config, write):
    (tmp_path / "in").mkdir()
    source = write(tmp_path / "in", texts)
    store = prepare(make_config(source=source, holdout=0.3), say=quiet)
    found = {}
    for split in (store.train, store.holdout):
        texts_of = [bytes(split.document(i).tolist()[1:-1]).decode() for i in range(split.documents)]
        assert [texts.index(text) for text in texts_of] == sorted(texts.index(text) for text in texts_of)
        found[split.folder.name] = texts_of
        for i, text in enumerate(texts_of):
            origin, number = split.origin(i), texts.index(text)
            assert origin is not None
            assert origin.file.endswith("ab"[number >= 25] + (".bin" if write is megatron_files else ".npy"))
            assert origin.line == (number - 25 if number >= 25 else number) + 1
        whole = split.read(0, split.tokens)
        assert whole.tolist() == [id_ for text in texts_of for id_ in ids_of(text)]
        for start, stop in ((0, 0), (3, 4), (100, 1500), (split.tokens - 1, split.tokens)):
            assert split.read(start, stop).tolist() == whole[start:stop].tolist()
    assert sorted(found["train"] + found["holdout"]) == sorted(texts)
    assert 5 < len(found["holdout"]) < 35
    held = sum(len(text.encode()) for text in found["holdout"])
    assert store.header.holdout_split.source_bytes == held == int(store.holdout.token_bytes.sum())
    assert not [name for name in store.path.rglob("*") if name.name.startswith("tokens-")]
    store.verify()


def test_the_side_follows_from_the_ids_alone(texts, tmp_path, make_config):
    """Whatever the format, the width and the file."""
    fingerprints, held = set(), []
    for number, write in enumerate((megatron_files, array_files)):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = make_config(source=write(folder, texts), holdout=0.3, store=str(tmp_path / f"store{number}"))
        store = prepare(config, say=quiet)
        held.append(store.holdout.read(0, store.holdout.tokens).tolist())
        fingerprints.add(store.fingerprint)
    assert held[0] == held[1]
    assert len(fingerprints) == 2


def test_training_and_scores_are_those_of_a_copied_store(texts, tmp_path, make_config):
    config = make_config(source=array_files(tmp_path, texts, "uint16"), holdout=0.3)
    store = prepare(config, say=quiet)
    loader = Loader(Chunks(store.train, 32), config, Course.steady(4, 32), seed=1)
    batch = next(loader)
    loader.close()
    whole = store.train.read(0, store.train.tokens)
    _, _, rows = loader.reading.where(np.arange(4))
    np.testing.assert_array_equal(batch.tokens, np.stack([whole[r * 32 : r * 32 + 32] for r in rows]))
    assert evaluate_ngram(store, ByteTokenizer()).source_bytes == store.header.holdout_split.source_bytes


def test_a_changed_file_is_noticed(texts, tmp_path, make_config):
    config = make_config(source=array_files(tmp_path, texts))
    ensure_store(config, say=quiet)
    file = tmp_path / "a.npy"
    data = bytearray(file.read_bytes())
    data[4] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"a.npy: changed since"):
        ensure_store(config, say=quiet)
    with pytest.raises(UserError, match=r"a.npy: changed since .* was made of it"):
        open_store(config.store).verify()
    file.write_bytes(data + b"\0\0\0\0")
    with pytest.raises(UserError, match=r"a.npy: \d+ bytes, and it had \d+ when"):
        open_store(config.store)
    file.unlink()
    with pytest.raises(UserError, match=r"a.npy: not there, and .* reads its tokens in place"):
        open_store(config.store)


@pytest.mark.parametrize("holdout", [0.0, 0.3, 0.99])
def test_the_range_of_ids_of_each_side(texts, tmp_path, make_config, monkeypatch, holdout):
    """Found in one reading, whatever the blocks of it cut."""
    monkeypatch.setattr("k3train.data.in_place._BLOCK", 37)
    store = prepare(make_config(source=megatron_files(tmp_path, texts), holdout=holdout), say=quiet)
    for split in (store.train, store.holdout):
        ids = split.read(0, split.tokens)
        assert (split.counts.min_id, split.counts.max_id) == ((ids.min(), ids.max()) if len(ids) else (0, -1))


def test_a_megatron_pair_that_changes_is_noticed(tmp_path, make_config):
    """Either file of it: contents, length, absence."""
    documents = [[ids_of("text")], [ids_of("more")], [ids_of("rest")]]
    megatron(tmp_path / "a.bin", documents)
    config = make_config(source={"kind": "megatron", "files": [f"{tmp_path}/a.bin"]})
    ensure_store(config, say=quiet)
    ensure_store(config, say=quiet)
    good = {name: (tmp_path / name).read_bytes() for name in ("a.bin", "a.idx")}
    megatron(tmp_path / "a.bin", [[ids_of("text"), ids_of("more")], [ids_of("rest")]])  # the same .bin
    assert (tmp_path / "a.bin").read_bytes() == good["a.bin"]
    with pytest.raises(UserError, match=r"a.idx: changed since the store was made(.|\n)*--replace"):
        ensure_store(config, say=quiet)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(UserError, match=r"a.idx: gone since the store was made"):
        ensure_store(config, say=quiet)
    (tmp_path / "a.idx").write_bytes(good["a.idx"])
    ensure_store(config, say=quiet)
    for data, says in ((good["a.bin"][:-2], r"a.bin: \d+ bytes, and it had"), (good["a.bin"][::-1], r"a.bin: changed")):
        (tmp_path / "a.bin").write_bytes(data)
        with pytest.raises(UserError, match=says):
            ensure_store(config, say=quiet)
    (tmp_path / "a.bin").write_bytes(good["a.bin"])
    assert prepare(config, replace=True, say=quiet).train.documents == 3


def raw(folder, data, **source):
    (folder / "a.bin").write_bytes(data)
    return {"kind": "token_array", "files": [f"{folder}/a.bin"], "token_type": "uint16"} | source


def wide(folder):
    return raw(folder, np.array([257, 5, 258] * 10, "<u4").tobytes())


def too_large(folder):
    return raw(folder, np.array([257, 5, 300, 258], "<u2").tobytes())


def odd(folder):
    return raw(folder, b"abc")


def with_header(folder):
    np.save(folder / "a.npy", np.array([257, 5, 258], "<u2"))
    return {"kind": "token_array", "files": [f"{folder}/a.npy"], "token_type": "uint16"}


def without_index(folder):
    return raw(folder, b"abcd") | {"kind": "megatron", "token_type": None}


def index_of(change):
    def make(folder):
        megatron(folder / "a.bin", [[ids_of("text")], [ids_of("more")]])
        file = folder / "a.idx"
        file.write_bytes(change(file.read_bytes()))
        return {"kind": "megatron", "files": [f"{folder}/a.bin"]}

    return make


def foreign(folder):
    megatron(folder / "a.bin", [[ids_of("text")]])
    (folder / "a.bin").write_bytes(b"\1\0" * 3)
    return {"kind": "megatron", "files": [f"{folder}/a.bin"]}


def scattered(folder):
    megatron(folder / "a.bin", [[ids_of("text")], [ids_of("more")]], pointers=np.array([12, 0], "<i8"))
    return {"kind": "megatron", "files": [f"{folder}/a.bin"]}


def floats(folder):
    megatron(folder / "a.bin", [[ids_of("text")]], "<f4")
    return {"kind": "megatron", "files": [f"{folder}/a.bin"]}


def negative(folder):
    megatron(folder / "a.bin", [[[257, -3, 258]]], "<i4")
    return {"kind": "megatron", "files": [f"{folder}/a.bin"]}


def torn_documents(folder):
    megatron(folder / "a.bin", [[ids_of("text")], [ids_of("more")]], firsts=np.array([0, 1, 1], "<i8"))
    return {"kind": "megatron", "files": [f"{folder}/a.bin"]}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (wide, "every second id is 0, as in ids of 32 bits; set data.source.token_type: uint32"),
        (too_large, "a.bin: id 300 at token 2, and the tokenizer's ids are 0..258; mend data.tokenizer"),
        (odd, "3 bytes are no whole number of ids of 2 bytes"),
        (with_header, "has NumPy's header"),
        (lambda folder: raw(folder, b""), "a.bin: empty file"),
        (without_index, "a.idx: not there"),
        (index_of(lambda data: b"x" + data), "no Megatron index"),
        (index_of(lambda data: data[:-3]), "truncated or damaged"),
        (index_of(lambda data: data[:9] + b"\2" + data[10:]), "version 2 of the index"),
        (index_of(lambda data: data + b"\0\1"), "an index of several modes"),
        (foreign, "a.bin: 3 ids, and a.idx asks for 6; they do not belong together"),
        (scattered, "sequences do not lie one after the other"),
        (floats, "type code 7 is none of whole numbers"),
        (negative, "id -3 at token 1"),
        (torn_documents, "the document index does not run from the first sequence to the last"),
        (lambda _: {"kind": "megatron", "files": ["s3://bucket/a.bin"]}, "must lie on a disk; copy or mount them"),
    ],
)
def test_files_that_do_not_fit(tmp_path, make_config, make, says):
    with pytest.raises(UserError, match=re.escape(says)):
        prepare(make_config(source=make(tmp_path)), say=quiet)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("ids", "changes", "says"),
    [
        ([257, 65, 258, 66, 258], {}, "data.add_bos is true, but whether document 2 begins with the tokenizer's BOS"),
        ([65, 258, 257, 66, 258], {"add_bos": False}, "data.add_bos is false, but whether document 2 begins"),
        ([257, 65, 258, 257, 66], {}, "data.add_eos is true, but whether document 2 ends .* set data.add_eos: false"),
    ],
)
def test_bos_and_eos_are_as_the_config_says(tmp_path, make_config, ids, changes, says):
    source = raw(tmp_path, np.array(ids, "<u2").tobytes(), document_end=258)
    with pytest.raises(UserError, match=says):
        prepare(make_config(source=source, **changes), say=quiet)


def test_a_file_is_a_document_without_an_end(tmp_path, make_config):
    source = raw(tmp_path, np.array([65, 66, 67], "<u2").tobytes())
    store = prepare(make_config(source=source, add_bos=False, add_eos=False), say=quiet)
    assert (store.train.documents, store.train.tokens) == (1, 3)


def test_everything_held_out(texts, tmp_path, make_config):
    with pytest.raises(UserError, match=r"no documents are left to train on .60 are held out"):
        prepare(make_config(source=array_files(tmp_path, texts), holdout=1.0), say=quiet)


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "token_array", "files": ["a"]},
        {"kind": "text", "files": ["a"], "token_type": "uint16"},
        {"kind": "megatron", "files": ["a"], "document_end": 3},
        {"kind": "megatron", "corpus": "django-5.2.8"},
    ],
)
def test_keys_that_do_not_belong_together(source):
    with pytest.raises(ValueError, match=r"token_type|document_end|corpus"):
        DataConfig.model_validate({"store": "s", "sequence_length": 8, "source": source})
