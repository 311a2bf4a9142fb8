"""What each kind of file says when it is broken, under ``error``, and what ``skip`` and ``quarantine`` keep."""

import base64
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from k3train.config.errors import UserError
from k3train.data.prepare import prepare

from .conftest import quiet
from .formats import WRITERS, jsonl

ROWS = [{"text": f"document {i * 7919 % 10007} {'x' * (i % 50)}"} for i in range(3000)]


def skipping(files, **source):
    return {"files": [str(file) for file in files], "on_bad_record": "skip", "max_bad_share": 1.0} | source


def skips_of(store) -> list[dict]:
    return [json.loads(line) for line in (store.path / "skips.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_that_breaks_off(tmp_path, make_config, suffix):
    """Every whole line before the break is read."""
    file, whole = tmp_path / f"a.jsonl.{suffix}", jsonl(ROWS)
    compress = gzip.compress if suffix == "gz" else zstandard.compress
    file.write_bytes((compress(whole[:40_000]) + compress(whole[40_000:]))[:-3000])
    kind = "gzip" if suffix == "gz" else "zst"
    with pytest.raises(
        UserError, match=rf"a.jsonl.{suffix}: line \d+, byte \d+: truncated {kind}: the rest of the file"
    ):
        prepare(make_config([file]), say=quiet)
    store = prepare(make_config(source=skipping([file])), say=quiet)
    (skip,) = skips_of(store)
    assert skip["line"] == store.train.documents + 1
    assert whole[: skip["offset"]].count(b"\n") == store.train.documents > 500


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("damage", ["plain text", "flipped"])
def test_a_compressed_file_that_is_damaged(tmp_path, make_config, suffix, damage):
    file, good = tmp_path / f"a.jsonl.{suffix}", tmp_path / "good.txt"
    good.write_text("good")
    compress = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    data = bytearray(compress(jsonl(ROWS)))
    data[len(data) // 2] ^= 0x55
    file.write_bytes(jsonl(ROWS) if damage == "plain text" else bytes(data))
    with pytest.raises(UserError, match=rf"a.jsonl.{suffix}: line \d+, byte \d+: broken"):
        prepare(make_config([file, good]), say=quiet)
    store = prepare(make_config(source=skipping([file, good])), say=quiet)
    assert any(kind.startswith("broken") for kind in store.header.skipped)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a.parquet", "row 1: broken parquet: .*; the whole file is lost"),
        ("a.arrow", r"row 1: broken arrow: .*; the rest of the file is lost"),
        ("stream.arrow", r"row \d+: broken arrow: .*; the rest of the file is lost"),
        ("a.array_record", "row 1: broken array record: .*; the whole file is lost"),
    ],
)
@pytest.mark.parametrize("kept", [0.6, 0.0])
def test_a_file_of_rows_that_breaks_off(tmp_path, make_config, name, says, kept):
    good = tmp_path / "good.txt"
    good.write_text("good")
    WRITERS[name](tmp_path / name, ROWS[:300])
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(UserError, match=says):
        prepare(make_config([tmp_path / name, good]), say=quiet)
    store = prepare(make_config(source=skipping([tmp_path / name, good])), say=quiet)
    (skip,) = skips_of(store)
    assert skip["offset"] == -1
    if name == "stream.arrow" and kept:
        assert 1 < store.train.documents == skip["line"] < 301
    else:
        assert store.train.documents == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.array_record"])
def test_a_file_without_rows(tmp_path, make_config, name):
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    else:
        WRITERS["a.array_record"](tmp_path / name, []) if "array" in name else WRITERS["a.arrow"](tmp_path / name, [])
    with pytest.raises(UserError, match=r"row 1: (empty file|missing field|broken array record)"):
        prepare(make_config([tmp_path / name]), say=quiet)


COLUMNS = {
    "null": (pa.array(["a", None, "b"]), "row 2: field is not text: 'text' is null"),
    "blank": (pa.array(["a", " \n", "b"]), "row 2: empty document"),
    "numbers": (pa.array([1, 2, 3]), "row 1: field is not text: column 'text' is int64"),
    "too long": (
        pa.array(["a", "b" * 101, "b"]),
        "row 2: too long: 101 bytes, and data.source.max_document_bytes is 100",
    ),
    "broken UTF-8": (
        pa.Array.from_buffers(
            pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")]
        ),
        "row 2: invalid UTF-8: byte 0xff",
    ),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_bad_row(tmp_path, make_config, kind):
    column, says = COLUMNS[kind]
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    limit = {"max_document_bytes": 100}
    with pytest.raises(UserError, match=says):
        prepare(make_config(source={"files": [f"{tmp_path}/*"]} | limit), say=quiet)
    if kind != "numbers":
        store = prepare(make_config(source=skipping([tmp_path / "a.parquet"], **limit)), say=quiet)
        assert store.train.documents == 2


def test_a_missing_column_names_the_others(tmp_path, make_config):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: missing field: no column 'text'; it has 'body', 'id'"):
        prepare(make_config([tmp_path / "a.parquet"]), say=quiet)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (b"\x0a\x03abc", "row 2: broken record: neither a JSON object nor a tf.train.Example"),
        (b"\x0a\x00", "row 2: missing field: no 'text'; it has no bytes"),
        (b"plain", "row 2: broken JSON"),
        (b'{"txt": "a"}', "row 2: missing field: no 'text'; it has 'txt'"),
    ],
)
def test_a_bad_record_of_an_array_record(tmp_path, make_config, record, says):
    from .formats import _array_record

    _array_record(tmp_path / "a.array_record", [b'{"text": "a"}', record, b'{"text": "b"}'])
    with pytest.raises(UserError, match=says):
        prepare(make_config([tmp_path / "a.array_record"]), say=quiet)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz"])
def test_a_huge_line_is_not_read_into_memory(tmp_path, make_config, name):
    """A record over the limit is passed over in parts, and the next line is read."""
    huge, after = b"x" * 5000, b"" if name == "a.txt" else b"\n" + jsonl([{"text": "after"}])
    before = b"" if name == "a.txt" else jsonl([{"text": "before"}])
    data = before + huge + after
    file, good = tmp_path / name, tmp_path / "good.txt"
    good.write_text("good")
    file.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    size = 5000 + bool(after)
    with pytest.raises(UserError, match=f"too long: {size} bytes, and data.source.max_document_bytes is 1000"):
        prepare(make_config(source={"files": [str(file), str(good)], "max_document_bytes": 1000}), say=quiet)
    store = prepare(make_config(source=skipping([file, good], max_document_bytes=1000)), say=quiet)
    assert store.train.documents == (1 if name == "a.txt" else 3)
    assert store.header.skipped == {"too long": 1}


TEXTS = {
    "CRLF": (b'{"text": "a\\r\\nb"}\r\n{"text": "c"}\r\n', [b"a\r\nb", b"c"]),
    "no line end at the end": (b'{"text": "a"}', [b"a"]),
    "byte order mark": (b'\xef\xbb\xbf{"text": "a"}\n', [b"a"]),
    "NUL escaped": (b'{"text": "a\\u0000b"}\n', [b"a\0b"]),
    "other line ends in the text": ('{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c".encode()]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_that_is_good(tmp_path, make_config, case):
    data, wanted = TEXTS[case]
    (tmp_path / "a.jsonl").write_bytes(data)
    store = prepare(make_config([tmp_path / "a.jsonl"], add_bos=False, add_eos=False), say=quiet)
    assert sorted(bytes(store.train.document(i).tolist()) for i in range(store.train.documents)) == sorted(wanted)


BAD_TEXTS = {
    "binary": ("a.txt", bytes(range(256)), "line 2, byte 128: invalid UTF-8: byte 0x80"),
    "latin-1 among UTF-8": (
        "a.jsonl",
        '{"text": "né"}\n'.encode() + b'{"text": "n\xe9"}\n',
        "line 2, byte 27: invalid UTF-8",
    ),
    "binary in a JSONL file": ("a.jsonl", bytes(range(256)), "line 1, byte 0: broken JSON"),
    "binary that is no compressed file": ("a.jsonl.gz", bytes(range(256)), "line 1, byte 0: broken gzip"),
    "UTF-16": ("a.txt", "text".encode("utf-16"), "line 1, byte 0: invalid UTF-8: byte 0xff"),
    "NUL bytes between lines": ("a.jsonl", b'{"text": "a"}\n\0\0\0\n', "line 2, byte 14: broken JSON"),
    "a raw NUL in a string": ("a.jsonl", b'{"text": "a\0"}\n', "broken JSON: Invalid control character"),
    "two objects on a line": (
        "a.jsonl",
        b'{"text": "a"}{"text": "b"}\n',
        "line 1, byte 13: two JSON values on one line",
    ),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_text_that_is_bad(tmp_path, make_config, case):
    name, data, says = BAD_TEXTS[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says):
        prepare(make_config([tmp_path / name]), say=quiet)


def test_quarantine_keeps_the_record_for_mending(tmp_path, make_config):
    lines = [b'{"text": "a"}\n', b'{"text": "\xff"}\n', b"x" * (1 << 20) + b"yz\n", b'{"text": "b"}\n']
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    source = skipping([tmp_path / "a.jsonl"], on_bad_record="quarantine")
    store = prepare(make_config(source=source), say=quiet)
    kept = [json.loads(line) for line in (store.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(entry["line"], entry["kind"], entry["is_cut"]) for entry in kept] == [
        (2, "invalid UTF-8", False), (3, "broken JSON", True),
    ]  # fmt: skip
    assert base64.b64decode(kept[0]["bytes"]) == lines[1]
    assert base64.b64decode(kept[1]["bytes"]) == lines[2][: 1 << 20]
    assert store.header.skipped == {"broken JSON": 1, "invalid UTF-8": 1}
    assert (store.header.records, store.train.documents) == (4, 2)
    assert [set(skip) for skip in skips_of(store)] == [{"file", "line", "offset", "kind", "detail", "reason"}] * 2


@pytest.mark.parametrize(
    ("bad", "share", "passes"), [(1, 0.001, True), (2, 0.001, False), (2, 0.002, True), (1, 0.0, False)]
)
def test_too_many_bad_records_stop_it(tmp_path, make_config, bad, share, passes):
    lines = jsonl([{"text": f"document {i}"} for i in range(1000)]).splitlines(keepends=True)
    for i in range(bad):
        lines[300 + i] = b"[]\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    source = {"files": [str(tmp_path / "a.jsonl")], "on_bad_record": "skip", "max_bad_share": share}
    if passes:
        assert prepare(make_config(source=source), say=quiet).header.skipped == {"not a JSON object": bad}
        return
    says = (
        rf"{bad} of 1000 records are bad \({bad} not a JSON object\), .* is {share:g}. The first: .*a.jsonl: line 301"
    )
    with pytest.raises(UserError, match=says):
        prepare(make_config(source=source), say=quiet)
    said = []
    prepare(make_config(source=source | {"max_bad_share": 0.5}), say=said.append)
    assert said == ["1 of 1 pieces were tokenized before; going on from there"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("doubled", ["text", "url"])
def test_a_doubled_column(tmp_path, make_config, kind, doubled):
    names = ["text", doubled, "url"]
    table = pa.Table.from_arrays([pa.array(["a", "b"]) for _ in names], names=names)
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, file)
    else:
        with file.open("wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    source = {"files": [str(file)], "metadata_fields": ["url"]}
    with pytest.raises(UserError, match=rf"a.{kind}: row 1: doubled column: '{doubled}' names 2 columns"):
        prepare(make_config(source=source), say=quiet)
    if doubled == "url":
        assert prepare(make_config([file]), say=quiet).train.documents == 2
