"""Composition: extends, merge, overrides."""

import pytest

from k3train.config.compose import compose
from k3train.config.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(**files: str):
        for name, text in files.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path

    return write


def test_maps_merge_and_lists_scalars_and_null_replace(write):
    folder = write(
        base="m: {a: 1, b: [1, 2], c: {d: 1, e: 2}}\nn: {x: 1}\n",
        top="extends: base.yaml\nm:\n  b: [3]\n  c: {d: 5}\nn: null\n",
    )
    root = compose(folder / "top.yaml")
    assert root.plain() == {"m": {"a": 1, "b": [3], "c": {"d": 5, "e": 2}}, "n": None}
    assert root.value["m"].value["a"].origin.endswith("base.yaml:1")
    assert root.value["m"].value["c"].value["d"].origin.endswith("top.yaml:4")


def test_later_bases_win_over_earlier_ones(write):
    folder = write(one="a: 1\nb: 1\n", two="b: 2\n", top="extends: [one.yaml, two.yaml]\n")
    assert compose(folder / "top.yaml").plain() == {"a": 1, "b": 2}


def test_paths_are_relative_to_the_file_that_names_them(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "piece.yaml").write_text("a: 1\n")
    (tmp_path / "deep/middle.yaml").write_text("extends: ../piece.yaml\n")
    (tmp_path / "top.yaml").write_text("extends: deep/middle.yaml\n")
    assert compose(tmp_path / "top.yaml").plain() == {"a": 1}


@pytest.mark.parametrize(("text", "message"), [
    ("extends: missing.yaml\n", "top.yaml:1: extends: .*missing.yaml does not exist"),
    ("a: 1\nextends: top.yaml\n", "extends itself: top.yaml -> top.yaml"),
    ("extends: back.yaml\n", "extends itself: top.yaml -> back.yaml -> top.yaml"),
    ("extends: .\n", "top.yaml:1: extends: .* is a folder; name a YAML file in it"),
    ("extends: 3\n", "top.yaml:1: extends: takes a file name"),
])  # fmt: skip
def test_bad_extends(write, text, message):
    folder = write(top=text, back="extends: top.yaml\n")
    with pytest.raises(UserError, match=message):
        compose(folder / "top.yaml")


def test_a_file_may_be_reached_twice(write):
    folder = write(
        root="a: 1\n",
        left="extends: root.yaml\n",
        right="extends: root.yaml\nb: 2\n",
        top="extends: [left.yaml, right.yaml]\n",
    )
    assert compose(folder / "top.yaml").plain() == {"a": 1, "b": 2}


@pytest.mark.parametrize(("override", "value"), [
    ("m.a=1e-3", 1e-3), ("m.a=no", "no"), ("m.a=", None), ("m.a=[1, 2]", [1, 2]), ("m.a={b: 1}", {"b": 1}),
    ("m.a=x=y", "x=y"), ("m.a='7'", "7"), ("m.a=010", 10),
])  # fmt: skip
def test_overrides_are_yaml_values(write, override, value):
    root = compose(write(top="m: {a: 0, z: 1}\n") / "top.yaml", [override])
    assert root.plain() == {"m": {"a": value, "z": 1}}
    assert root.value["m"].value["a"].origin == "command line"


def test_overrides_create_sections_and_the_last_one_wins(write):
    root = compose(write(top="a: null\n") / "top.yaml", ["a.b.c=1", "a.b.c=2"])
    assert root.plain() == {"a": {"b": {"c": 2}}}


@pytest.mark.parametrize("override", ["m.a", "=1", "m..a=1", "m.a =1", "l.0=3", "m.a=[1", "extends=x.yaml"])
def test_malformed_overrides_are_named(write, override):
    with pytest.raises(UserError, match="override"):
        compose(write(top="m: {a: 0}\nl: [1]\n") / "top.yaml", [override])
