"""Sources in an object store make the store that the same files on a disk make."""

import pytest
from data.conftest import quiet
from data.formats import WRITERS, jsonl

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import put
from k3train.data.config import DataConfig
from k3train.data.prepare import ensure_store, prepare

ROWS = [{"text": f"document {i}"} for i in range(60)]


def config_of(folder, files, **source) -> DataConfig:
    values = {"store": str(folder), "sequence_length": 8, "holdout": 0.1, "source": {"files": files} | source}
    return DataConfig.model_validate(values)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("expected")
    (folder / "a.jsonl").write_bytes(jsonl(ROWS))
    return prepare(config_of(folder / "store", [str(folder / "a.jsonl")]), say=quiet).fingerprint


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.parquet", "stream.arrow", "a.arrow", "a.array_record"])
def test_each_kind_is_read_from_s3(s3, tmp_path, expected, name):
    WRITERS[name](tmp_path / name, ROWS)
    put(f"{s3}/in/{name}", (tmp_path / name).read_bytes())
    store = prepare(config_of(tmp_path / "store", [f"{s3}/in/*"]), say=quiet, piece_bytes=400)
    assert store.fingerprint == expected
    (file,) = store.header.source.files
    assert (file.path, file.sha256, bool(file.version)) == (f"{s3}/in/{name}", "", True)


def test_from_gs(gcs, tmp_path, expected):
    put(f"{gcs}/in/a.jsonl", jsonl(ROWS[:20]))
    put(f"{gcs}/in/b.jsonl", jsonl(ROWS[20:]))
    store = prepare(config_of(tmp_path / "store", [f"{gcs}/in/*.jsonl"]), say=quiet)
    assert store.fingerprint == expected


def test_workers_read_from_s3(s3, tmp_path, expected):
    put(f"{s3}/a.jsonl", jsonl(ROWS))
    store = prepare(config_of(tmp_path / "store", [f"{s3}/a.jsonl"], workers=2), say=quiet, piece_bytes=700)
    assert store.fingerprint == expected


def test_a_changed_object_and_none(s3, tmp_path):
    put(f"{s3}/in/a.txt", b"text a")
    config = config_of(tmp_path / "store", [f"{s3}/in/*.txt"])
    ensure_store(config, say=quiet)
    ensure_store(config, say=quiet)
    put(f"{s3}/in/a.txt", b"text b")
    with pytest.raises(UserError, match=r"in/a.txt: changed since the store was made"):
        ensure_store(config, say=quiet)
    for pattern, says in (
        (f"{s3}/none/*", "no object matches"),
        (f"{s3}/none.txt", "no object matches"),
        (f"{s3}/in", "is a folder; name its files"),
        ("ftp://host/a.txt", "no such object store"),
    ):
        with pytest.raises(UserError, match=says) as error:
            prepare(config_of(tmp_path / "other", [pattern]), say=quiet)
        if pattern.startswith(str(s3)):
            assert error.value.exit_code == ExitCode.CONFIG
