"""Every bad input, what is said about it under ``error``, and what is counted under ``skip``."""

import gzip
import json
import os

import pytest
from pydantic import ValidationError

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.config import DataConfig
from k3train.data.prepare import ensure_store, prepare

from .conftest import quiet

GOOD = b'{"text": "good"}\n'
LINES = {
    "broken JSON": (b'{"text": "a\n', "line 2, byte 28: broken JSON: Invalid control character at column 12"),
    "two JSON values on one line": (b'{"text": "a"} {"text": "b"}\n', "line 2, byte 31: two JSON values"),
    "missing field": (b'{"body": "a"}\n', "line 2, byte 17: missing field: no 'text'; it has 'body'"),
    "doubled field": (
        b'{"text": "a", "t\\u0065xt": "b"}\n',
        "line 2, byte 17: doubled field: 'text' stands there more",
    ),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}\n', "line 2, byte 17: byte order mark: inside the file"),
    "field is not text": (b'{"text": 7}\n', "line 2, byte 17: field is not text: 'text' is a number"),
    "not a JSON object": (b'["a"]\n', "line 2, byte 17: not a JSON object: it is an array"),
    "empty document": (b'{"text": " "}\n', "line 2, byte 17: empty document"),
    "empty line": (b"\n", "line 2, byte 17: empty line"),
    "invalid UTF-8": (b'{"text": "\xff"}\n', "line 2, byte 27: invalid UTF-8: byte 0xff"),
    "invalid Unicode": (b'{"text": "\\ud800"}\n', "line 2, byte 17: invalid Unicode: lone surrogate"),
}
FILES = {
    "empty file": ("a.txt", b"", "a.txt: line 1, byte 0: empty file"),
    "empty document": ("a.txt", b" \n\t", "a.txt: line 1, byte 0: empty document: white space only"),
    "invalid UTF-8": ("a.txt", b"one\ntwo\xe9 three", "a.txt: line 2, byte 7: invalid UTF-8: byte 0xe9"),
    "empty jsonl": ("a.jsonl", b"", "a.jsonl: line 1, byte 0: empty file"),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(GOOD * 9)[:-9], r"line \d+, byte \d+: truncated gzip"),
    "broken gzip": ("a.jsonl.gz", b"no gzip at all", "line 1, byte 0: broken gzip"),
    "damaged gzip": ("a.jsonl.gz", gzip.compress(GOOD)[:12] + b"\xff\xff" + gzip.compress(GOOD)[14:], "broken gzip"),
    "empty gzip": ("a.jsonl.gz", gzip.compress(b""), "line 1, byte 0: empty file"),
}


def run(config: DataConfig):
    return prepare(config, say=quiet)


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_line(tmp_path, make_config, kind, suffix):
    line, says = LINES[kind]
    file, data = tmp_path / f"a{suffix}", GOOD + line + GOOD.replace(b"good", b"after")
    file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    with pytest.raises(UserError, match=says) as error:
        run(make_config([file]))
    assert error.value.exit_code is ExitCode.CONFIG
    assert str(file) in str(error.value)
    assert "on_bad_record: skip" in str(error.value)
    store = run(make_config(source={"files": [str(file)], "on_bad_record": "skip", "max_bad_share": 1.0}))
    assert store.train.documents == 2
    assert store.header.skipped == {kind: 1}
    (skip,) = [json.loads(line) for line in (store.path / "skips.jsonl").read_text().splitlines()]
    assert (skip["file"], skip["line"], skip["kind"]) == (str(file), 2, kind)
    assert skip["offset"] >= 17 and skip["reason"].startswith(kind)


@pytest.mark.parametrize("case", FILES)
def test_bad_file(tmp_path, make_config, case):
    name, data, says = FILES[case]
    file, good = tmp_path / name, tmp_path / "good.txt"
    file.write_bytes(data)
    good.write_text("good")
    with pytest.raises(UserError, match=says):
        run(make_config([file, good]))
    assert not (tmp_path / "store").exists()
    store = run(make_config(source={"files": [str(file), str(good)], "on_bad_record": "skip", "max_bad_share": 1.0}))
    assert sum(store.header.skipped.values()) == 1
    assert store.train.documents >= 1


def test_truncated_gzip_keeps_the_lines_before(tmp_path, make_config):
    file = tmp_path / "a.jsonl.gz"
    whole = b"".join(json.dumps({"text": f"document {i * 7919}"}).encode() + b"\n" for i in range(5000))
    file.write_bytes(gzip.compress(whole)[:-2000])
    store = run(make_config(source={"files": [str(file)], "on_bad_record": "skip", "max_bad_share": 1.0}))
    assert 0 < store.train.documents < 5000
    (skip,) = [json.loads(line) for line in (store.path / "skips.jsonl").read_text().splitlines()]
    assert skip["line"] == store.train.documents + 1
    assert whole[: skip["offset"]].count(b"\n") == store.train.documents


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["none/*.txt"], r"no file matches none/\*\.txt"),
        (["gone.txt"], "no file matches gone.txt"),
        (["a.pdf"], "a.pdf is none of .txt, .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, .array_record"),
        (["*"], "is none of"),
        (["folder"], "is a folder; name its files"),
        (["linked/*.txt"], "linked/gone.txt is a link to nothing; mend or remove it"),
        (["~nobody-of-that-name/*.txt"], "cannot be looked up"),
        (["x" * 300], "cannot be looked up .File name too long"),
    ],
)
def test_files_that_do_not_fit(tmp_path, make_config, monkeypatch, patterns, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    (tmp_path / "folder").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "gone.txt").symlink_to("nowhere.txt")
    with pytest.raises(UserError, match=says):
        run(make_config(source={"files": patterns}))


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("/", "the top of a disk is no place for a store"),
        (".", "something that is no token store lies there"),
        ("..", "something that is no token store lies there"),
        ("x" * 300, "cannot be written .File name too long"),
        ("a.txt/store", "cannot be written .Not a directory|cannot be written .File exists"),
    ],
)
def test_places_that_are_none_for_a_store(tmp_path, make_config, monkeypatch, store, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=says):
        run(make_config([tmp_path / "a.txt"], store=store))
    assert {p.name for p in tmp_path.iterdir()} <= {"a.txt"}


def test_a_byte_order_mark_is_no_part_of_a_jsonl_file(tmp_path, make_config):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + GOOD * 2)
    assert run(make_config([tmp_path / "a.jsonl"])).train.documents == 2
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"} 7\n')
    with pytest.raises(UserError, match="line 1, byte 17: two JSON values"):  # bytes of the mark count
        run(make_config([tmp_path / "b.jsonl"], store=str(tmp_path / "other")))


def test_doubled_keys_matter_where_they_are_read(tmp_path, make_config):
    """Of others the last value is taken, or they are passed over, also further inside."""
    line = b'{"text": "a", "url": 1, "url": 2, "more": {"text": 1, "text": 2}}\n'
    (tmp_path / "a.jsonl").write_bytes(line)
    source = {"files": [str(tmp_path / "a.jsonl")], "metadata_fields": ["more"]}
    assert run(make_config(source=source)).train.metadata(0) == {"more": {"text": 2}}
    with pytest.raises(UserError, match="doubled field: 'url' stands there more than once"):
        run(make_config(source=source | {"metadata_fields": ["url"]}, store=str(tmp_path / "other")))


def test_repeated_documents_and_names(tmp_path, make_config):
    """Both are kept, and each with its place and metadata; ``data dedup`` is what leaves them out."""
    lines = [{"text": "same", "id": 1}, {"text": "same", "id": 1}, {"text": "other", "id": 1}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    store = run(make_config(source={"files": [str(tmp_path / "a.jsonl")], "metadata_fields": ["id"]}))
    assert (store.train.documents, store.header.records, store.header.skipped) == (3, 3, {})
    origins = [store.train.origin(i) for i in range(3)]
    assert sorted(origin.line for origin in origins if origin) == [1, 2, 3]
    assert [store.train.metadata(i) for i in range(3)] == [{"id": 1}] * 3


def test_globs_find_each_file_once(tmp_path, make_config):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("in/a.txt", "in/deep/b.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "in" / "a.txt")
    patterns = [f"{tmp_path}/in/**/*.txt", f"{tmp_path}/in/a.txt"]
    assert run(make_config(source={"files": patterns})).train.documents == 2


def test_a_file_name_with_brackets_is_a_file(tmp_path, make_config):
    (tmp_path / "a[1].txt").write_text("text")
    assert run(make_config([tmp_path / "a[1].txt"])).train.documents == 1


def test_no_documents_left(tmp_path, make_config):
    (tmp_path / "a.txt").write_bytes(b"")
    config = make_config(source={"files": [f"{tmp_path}/*.txt"], "on_bad_record": "skip", "max_bad_share": 1.0})
    with pytest.raises(UserError, match=r"no documents are left \(1 records skipped: 1 empty file\)"):
        run(config)


def test_everything_held_out(tmp_path, make_config):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="all 1 documents are held out"):
        run(make_config([tmp_path / "a.txt"], holdout=1.0))


def test_no_source(make_config):
    with pytest.raises(UserError, match="nothing to prepare from"):
        run(make_config())


def test_corpus_and_files_exclude_each_other(make_config):
    with pytest.raises(ValidationError, match="either corpus or files"):
        make_config(source={"corpus": "django-5.2.8", "files": ["a.txt"]})


def test_text_field(tmp_path, make_config):
    (tmp_path / "a.jsonl").write_text('{"body": "text"}')
    config = make_config(source={"files": [f"{tmp_path}/a.jsonl"], "text_field": "body"})
    assert run(config).header.train.source_bytes == 4


def test_bytes_of_the_text_are_kept_exactly(tmp_path, make_config):
    data = "\ufeffa\r\nb\x00c\n".encode()
    (tmp_path / "a.txt").write_bytes(data)
    store = run(make_config([tmp_path / "a.txt"], add_bos=False, add_eos=False))
    assert bytes(store.train.document(0).tolist()) == data


@pytest.mark.parametrize("pattern", ["a.jsonl", "*.jsonl"])
def test_a_pipe_or_a_device_is_no_source(tmp_path, make_config, pattern):
    """One would wait for ever, the other never end."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a.jsonl is a pipe or a device, not a file"):
        prepare(make_config([tmp_path / pattern]), say=quiet)
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"a.jsonl is a pipe or a device, not a file"):
        prepare(make_config([tmp_path / pattern]), say=quiet)


@pytest.mark.parametrize("address", ["ftp://host/a.jsonl", "ftp://host/*.jsonl"])
def test_an_address_that_nobody_knows_is_a_fault_of_the_config(make_config, address):
    with pytest.raises(UserError, match="no such object store") as error:
        prepare(make_config(source={"files": [address]}), say=quiet)
    assert error.value.exit_code == ExitCode.CONFIG


def test_a_store_in_an_object_store(tmp_path, make_config, monkeypatch):
    """It used to become a local folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    config = make_config([tmp_path / "a.txt"], store="s3://bucket/store")
    for call in (prepare, ensure_store):
        with pytest.raises(UserError, match=r"data.store: s3://bucket/store is no place for a token store"):
            call(config, say=quiet)
    with pytest.raises(UserError, match=r"is no place for a token store"):
        ensure_store(config.model_copy(update={"source": None}), say=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
