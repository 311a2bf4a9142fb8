"""The strict YAML reader: YAML 1.2 scalars, and one clear message for everything it does not read."""

import math

import pytest

from k3train.config.compose import compose
from k3train.config.errors import UserError
from k3train.config.yaml_reader import read_file, read_text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("3e4", 3e4), ("1.0e4", 1e4), ("1.", 1.0), (".5", 0.5), ("-2.5", -2.5), ("1E+3", 1e3),
        ("010", 10), ("0o10", 8), ("0x1F", 31), ("+3", 3), ("-0", 0), ("1_000", "1_000"), ("0b11", "0b11"),
        ("no", "no"), ("on", "on"), ("yes", "yes"), ("off", "off"), ("y", "y"), ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"), ("null", None), ("~", None), ("", None), ("Null", None),
        ("true", True), ("false", False), ("True", True), ("tRue", "tRue"), ("'1'", "1"), ('"null"', "null"),
        ("e5", "e5"), (".inf", math.inf), ("-.INF", -math.inf), ("inf", "inf"), ("2.0B", "2.0B"), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_scalars_follow_yaml_1_2(text, value):
    read = read_text(f"key: {text}", "t").value["key"].value
    assert read == value
    assert type(read) is type(value)


def test_nan_is_a_float():
    assert math.isnan(read_text("key: .nan", "t").value["key"].value)


def test_every_node_knows_its_line():
    root = read_text("a: 1\nb:\n  c: [1,\n    2]\n", "f.yaml")
    assert root.value["b"].origin == "f.yaml:2"
    assert root.value["b"].value["c"].origin == "f.yaml:3"
    assert [item.origin for item in root.value["b"].value["c"].value] == ["f.yaml:3", "f.yaml:4"]


def test_anchors_are_read():
    assert read_text("a: &x {b: 1}\nc: *x\n", "t").plain() == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: duplicate key 'a', first given at .*f.yaml:1"),
        ("a:\n  b: 1\n  b: 1\n", "f.yaml:3: duplicate key 'b'"),
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- a\n- b\n", "must hold a map"),
        ("a:\n\tb: 1\n", "f.yaml:2: not valid YAML: a tab"),
        ("a: [1, 2\nb: 3\n", "f.yaml:2: not valid YAML"),
        ("a: 'open\n", "not valid YAML"),
        ("a: b: c\n", "f.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "several documents"),
        ("a: 1\nb: \x07\n", "f.yaml:2: a control character"),
        ("a: 1\n<<: {b: 2}\n", "f.yaml:2: merge keys"),
        ("a: !!python/name:os.system x\n", "f.yaml:1: tags"),
        ("a: &a [*a]\n", "f.yaml:1: an alias"),
        ("a: *nowhere\n", "f.yaml:1: not valid YAML"),
        ("? [1]\n: 2\n", "f.yaml:1: a key must be a name"),
        (f"a: 1\nb: {'9' * 5000}\n", "f.yaml:2: a number of 5000 digits"),
    ],
)
def test_what_is_not_read_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_file(path)


def test_files_that_are_none(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("a: ü".encode("latin-1"))
    for name, message in (("latin.yaml", "not UTF-8"), (".", "is a folder"), ("missing.yaml", "no such file")):
        with pytest.raises(UserError, match=message):
            read_file(tmp_path / name)


def test_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_file(tmp_path / "bom.yaml").plain() == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 3000 + "]" * 3000, "nested hundreds deep"),
        ("".join("  " * i + "a:\n" for i in range(1200)), "nested hundreds deep"),
        (
            "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
            + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcde", "bcdef", strict=True)),
            "more than 100,000 values",
        ),
    ],
    ids=["lists", "maps", "aliases"],
)
def test_files_that_grow_without_measure(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_file(tmp_path / "x.yaml")


def test_names_that_lead_nowhere(tmp_path):
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for name, message in (("loop.yaml", "symbolic links"), ("a\0b", "no file name"), ("x" * 300, "too long")):
        with pytest.raises(UserError, match=message):
            compose(tmp_path / name)
