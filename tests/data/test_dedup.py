"""Duplicates: found exactly and nearly, the earliest kept, the list the same whatever the workers, and honoured."""

import json
from pathlib import Path

import numpy as np
import pytest

from k3train.cli.main import main
from k3train.config.errors import UserError
from k3train.data.dedup import dedup
from k3train.data.prepare import ensure_store, prepare
from k3train.data.sketch import BANDS, SHINGLE, bands, exact_key, signature, similarity

from .conftest import quiet
from .formats import jsonl


def words(seed: int, count: int) -> list[str]:
    return [f"w{i}" for i in np.random.default_rng(seed).integers(0, 5000, count)]


def changed(text: list[str], places: int) -> list[str]:
    """The text with so many words replaced, far from one another."""
    new = list(text)
    for i in range(places):
        new[(i * len(text)) // places] = f"new{i}"
    return new


def jaccard(a: list[str], b: list[str]) -> float:
    x, y = ({tuple(t[i : i + SHINGLE]) for i in range(len(t) - SHINGLE + 1)} for t in (a, b))
    return len(x & y) / len(x | y)


@pytest.fixture
def sources(tmp_path) -> list[Path]:
    """Two files: 30 texts; then copies, some respelled, some with changes, and 10 new ones."""
    texts = [words(i, 300) for i in range(30)]
    first = [{"text": " ".join(text)} for text in texts]
    second = [{"text": " ".join(texts[i])} for i in range(5)]
    second += [{"text": " ".join(texts[i]).upper().replace(" ", " \n")} for i in range(5, 10)]
    second += [{"text": " ".join(changed(texts[i], 3))} for i in range(10, 15)]
    second += [{"text": " ".join(changed(texts[i], 60))} for i in range(15, 20)]
    second += [{"text": " ".join(words(100 + i, 300))} for i in range(10)] + [{"text": "short"}, {"text": "Short "}]
    folder = tmp_path / "in"
    folder.mkdir()
    for name, rows in (("a", first), ("b", second)):
        (folder / f"{name}.jsonl").write_bytes(jsonl(rows))
    return sorted(folder.iterdir())


def entries(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_signatures_estimate_similarity():
    base = words(1, 2000)
    mine = signature(" ".join(base))
    for places in (0, 2, 20, 60, 150):
        other = changed(base, places) if places else base
        estimate = similarity(mine, signature(" ".join(other)))
        assert abs(estimate - jaccard(base, other)) < 0.13
    assert similarity(mine, signature(" ".join(words(2, 2000)))) < 0.1


def test_bands_are_equal_where_their_values_are():
    random = np.random.default_rng(3)
    a = random.integers(0, 2**32, 128, np.uint32)
    b = a.copy()
    b[40] ^= 1
    same = bands(np.stack([a, b]))[0] == bands(np.stack([a, b]))[1]
    assert same.sum() == BANDS - 1 and not same[40 // 8]


def test_normalised_texts_are_equal():
    assert exact_key("Cafe\u0301  au\nlait ") == exact_key("café au lait")
    assert exact_key("a b") != exact_key("ab")
    assert similarity(signature("你好世界，今天天气很好"), signature("你好世界。今天天气很好")) == 1.0
    assert similarity(signature("!!!"), signature("???")) < 0.1
    assert signature("one two").shape == signature("").shape == (128,)


def test_what_is_listed(sources, make_config, tmp_path):
    out = tmp_path / "lists" / "duplicates.jsonl"
    found = dedup(make_config(sources), out, say=quiet)
    head, *listed = entries(out)
    assert (found.documents, found.exact, found.near) == (62, 11, 5)
    assert (head["documents"], head["listed"], head["threshold"]) == (62, 16, 0.8)
    lines = [file.read_bytes() for file in sources]
    starts = [[0, *np.cumsum([len(line) for line in data.splitlines(keepends=True)]).tolist()] for data in lines]
    place = {(str(file), at): (n, starts[n].index(at)) for n, file in enumerate(sources) for at in starts[n]}
    pairs = {place[e["file"], e["at"]]: (place[e["of"]["file"], e["of"]["at"]], e["kind"]) for e in listed}
    expected = {(1, i): ((0, i), "exact") for i in range(10)} | {(1, i): ((0, i), "near") for i in range(10, 15)}
    assert pairs == expected | {(1, 31): ((1, 30), "exact")}
    assert all(e["similarity"] >= 0.8 for e in listed if e["kind"] == "near")
    assert found.duplicate_bytes == sum(len(json.loads(lines[n].splitlines()[i])["text"].encode()) for n, i in pairs)
    assert sorted(file.name for file in out.parent.iterdir()) == ["duplicates.jsonl"]


def test_pieces_and_workers_change_nothing(sources, make_config, tmp_path):
    source = {"files": [str(file) for file in sources]}
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    dedup(make_config(source=source | {"workers": 1}), one, say=quiet)
    dedup(make_config(source=source | {"workers": 2}), two, say=quiet, piece_bytes=20_000)
    assert one.read_bytes() == two.read_bytes()


def test_threshold(sources, make_config, tmp_path):
    found = [dedup(make_config(sources), tmp_path / "d", threshold=t, say=quiet) for t in (1.0, 0.05)]
    assert found[0].near == 0
    assert found[1].near >= 5
    for threshold in (0.0, 1.5):
        with pytest.raises(UserError, match="--threshold"):
            dedup(make_config(sources), tmp_path / "d", threshold=threshold, say=quiet)


@pytest.mark.parametrize("piece_bytes", [None, 20_000])
def test_prepare_leaves_them_out(sources, make_config, tmp_path, piece_bytes):
    out = tmp_path / "duplicates.jsonl"
    dedup(make_config(sources), out, say=quiet)
    source = {"files": [str(file) for file in sources], "duplicates": str(out)}
    config = make_config(source=source)
    store = prepare(config, say=quiet, piece_bytes=piece_bytes)
    assert (store.train.documents, store.header.duplicates, store.header.records) == (46, 16, 62)
    origins = [store.train.origin(i) for i in range(46)]
    kept = {(origin.file, origin.offset) for origin in origins if origin is not None}
    assert len(kept) == 46 and not kept & {(entry["file"], entry["at"]) for entry in entries(out)[1:]}
    ensure_store(config, say=quiet)
    with pytest.raises(UserError, match=r"data.source.duplicates .sha256.: the store has"):
        prepare(make_config(sources), say=quiet)


def test_lists_that_do_not_fit(sources, make_config, tmp_path):
    out = tmp_path / "duplicates.jsonl"
    dedup(make_config(sources), out, say=quiet)
    config = make_config(source={"files": [str(file) for file in sources], "duplicates": str(out)})
    whole = out.read_text()
    for text, says in (
        ("\n".join(whole.split("\n")[:-4]), "lists other documents than the 16 it speaks of; truncated"),
        (whole[:-20], "no list that data dedup writes"),
        ("{}\n", "no list that data dedup writes"),
        (whole.replace("duplicates 1", "duplicates 2"), "no list that data dedup writes"),
    ):
        out.write_text(text)
        with pytest.raises(UserError, match=says):
            prepare(config, say=quiet)
    out.write_text(whole)
    sources[0].write_bytes(sources[0].read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(UserError, match=r"made of other sources than data\.source names, or of earlier contents"):
        prepare(config, say=quiet)
    out.unlink()
    with pytest.raises(UserError, match=r"data.source.duplicates: .* cannot be read"):
        prepare(config, say=quiet)


def test_bad_records_and_sources(sources, make_config, tmp_path):
    sources[1].write_bytes(sources[1].read_bytes() + b"no json\n")
    for piece_bytes in (None, 20_000):
        with pytest.raises(UserError, match=r"b.jsonl: line 33, byte \d+: broken JSON"):
            dedup(make_config(sources), tmp_path / "d", say=quiet, piece_bytes=piece_bytes)
    source = {"files": [str(file) for file in sources], "on_bad_record": "skip"}
    assert dedup(make_config(source=source), tmp_path / "d", say=quiet).documents == 62
    with pytest.raises(UserError, match="dedup reads text"):
        dedup(make_config(source={"kind": "megatron", "files": ["a.bin"]}), tmp_path / "d", say=quiet)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".d.")] == []


def test_the_command(sources, tmp_path, capsys, root):
    (tmp_path / "e.yaml").write_text(f"extends: {root}/configs/experiments/quickstart.yaml\n")
    changes = "data.source.corpus=null", f"data.source.files=[{sources[0].parent}/*.jsonl]"
    assert main(["data", "dedup", str(tmp_path / "e.yaml"), *changes, "--out", str(tmp_path / "d.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "d.jsonl: 11 exact and 5 near duplicates among 62 documents" in said
