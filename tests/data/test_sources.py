"""Every kind of source file makes the same store of the same documents, however it is cut into pieces."""

import importlib
import json
import sys
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from k3train.config.errors import UserError
from k3train.data.files import describe, find_files
from k3train.data.prepare import prepare
from k3train.data.sources import cut

from .conftest import quiet
from .formats import WRITERS, hugging_face


@pytest.fixture(scope="module")
def rows(texts) -> list[dict]:
    return [{"id": f"d{i}", "text": text, "n": 7} for i, text in enumerate(texts)]


@pytest.mark.parametrize("piece_bytes", [None, 1500])
@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_makes_the_same_store(store, texts, rows, tmp_path, make_config, name, piece_bytes):
    WRITERS[name](tmp_path / name, rows)
    source = {"files": [str(tmp_path / name)], "metadata_fields": ["id", "none"]}
    config = make_config(source=source, holdout=0.2)
    made = prepare(config, say=quiet, shard_tokens=997, piece_bytes=piece_bytes)
    assert made.fingerprint == store.fingerprint
    made.verify()
    for split in (made.train, made.holdout):
        for i in range(split.documents):
            text = bytes(split.document(i).tolist()[1:-1]).decode()
            origin, number = split.origin(i), texts.index(text)
            assert origin is not None
            half = len(rows) // 2
            assert origin.line == (number % half if name == "dataset" else number) + 1
            assert split.metadata(i) == {"id": f"d{number}", "none": None}
            if name.startswith("a.jsonl"):
                line = json.dumps(rows[number], ensure_ascii=False).encode()
                assert (
                    line
                    == b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in rows)[
                        origin.offset : origin.offset + len(line)
                    ]
                )
    assert (made.header.records, made.header.skipped) == (len(texts), {})


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("a.jsonl", 16),
        ("a.jsonl.gz", 1),
        ("a.jsonl.zst", 1),
        ("a.parquet", 9),
        ("stream.arrow", 7),
        ("a.array_record", 16),
    ],
)
def test_what_can_be_cut_is_cut(tmp_path, rows, name, pieces):
    WRITERS[name](tmp_path / name, rows)
    file = describe(str(tmp_path / name))
    made = cut([file], file.bytes // 16 + 1)
    assert len(made) == pieces
    assert all(piece.stop == after.start for piece, after in pairwise(made))


def test_small_files_are_read_together(text_files):
    files = [describe(str(file)) for file in text_files]
    made = cut(files, 2000)
    assert [i for piece in made for i in piece.files] == list(range(len(files)))
    assert 3 < len(made) < len(files)
    assert len(cut(files)) == 1


def test_dictionary_and_large_columns(tmp_path, make_config):
    large = pa.table({"text": pa.array(["a", "b"], pa.large_string())})
    coded = pa.table({"text": pa.array(["c", "c", "d"]).dictionary_encode()})
    pq.write_table(large, tmp_path / "large.parquet")
    pq.write_table(coded, tmp_path / "coded.parquet")
    store = prepare(make_config(source={"files": [f"{tmp_path}/*.parquet"]}), say=quiet)
    assert (store.train.documents, store.header.train.source_bytes) == (5, 5)


def test_dataset_folders_that_do_not_fit(tmp_path, rows):
    both = tmp_path / "both"
    both.mkdir()
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    hugging_face(both / "train", rows)
    with pytest.raises(UserError, match=f"holds several splits; name one: {both}/train or {both}/test"):
        find_files((str(both),))
    assert len(find_files((str(both / "train"),))) == 2
    assert len(find_files((f"{both}/tr*",))) == 2
    (both / "train" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"data-00001-of-00002.arrow: named by .*state.json, but not there"):
        find_files((str(both / "train"),))
    (both / "train" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"state.json: broken"):
        find_files((str(both / "train"),))


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.parquet", "pyarrow"), ("a.arrow", "pyarrow"), ("a.jsonl.zst", "zstandard")],
)
def test_a_missing_package_names_the_extra(tmp_path, rows, make_config, monkeypatch, name, package):
    WRITERS[name](tmp_path / name, rows)
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    real = importlib.import_module

    def without(module, *args, **kwargs):
        if module.partition(".")[0] == package:
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr("k3train.data.extras.importlib.import_module", without)
    with pytest.raises(UserError, match=rf"needs the package {package}, .* pip install 'k3train\[data\]'"):
        prepare(make_config([tmp_path / name]), say=quiet)
