"""Every key has a drift class; what differs between two experiments is found and named."""

import pytest

from k3train.config.drift import ABSENT, Change, classes, compare, derived, guarded
from k3train.config.section import Branch, Drift, Free, Frozen, Section
from k3train.experiment import Experiment


class Inner(Section, drift="branch"):
    """Values of one class, and one of another."""

    rate: float = 1.0
    """A number."""
    shape: Frozen[tuple[int, ...]] = (1, 2)
    """A list."""


class Whole(Section, drift="free"):
    """Sections and values."""

    inner: Inner = Inner()
    maybe: Inner | None = None
    name: str
    """Required."""


def dump(**values) -> dict:
    return Whole(**{"name": "a", **values}).model_dump(mode="json")


def test_every_key_of_the_experiment_has_a_class():
    found = classes(Experiment)
    expected = {
        "model.hidden_size": "frozen",
        "model.moe.top_k": "frozen",
        "model.mtp": "frozen",
        "model.mtp.loss_weight": "branch",
        "data.shuffle_seed": "frozen",
        "data.tokenizer.kind": "frozen",
        "data.tokenizer.path": "free",
        "run.seed": "frozen",
        "optim.matrices": "frozen",
        "optim.muon.per_head": "frozen",
        "optim.muon.lr": "branch",
        "train.tokens": "branch",
        "optim.schedule.kind": "branch",
        "optim.balance.rate": "branch",
        "optim.qk_clip": "branch",
        "train.global_batch": "branch",
        "data.sequence_length": "branch",
        "train.accumulation": "free",
        "train.remat": "free",
        "mesh.fsdp": "free",
        "kernels.kda": "free",
        "checkpoint.every": "free",
        "eval.every": "free",
        "run.dir": "free",
        "data.source": "free",
    }
    assert {key: found.get(key) for key in expected} == expected


def test_a_key_without_a_class_is_named():
    class Bare(Section):
        """No class."""

        size: int = 1
        """A number."""

    class Outer(Section, drift="free"):
        """Holds it."""

        bare: Bare = Bare()

    with pytest.raises(TypeError, match=r"bare\.size has no drift class.*class Bare"):
        classes(Outer)


def test_a_key_takes_its_sections_class_and_a_section_its_strictest_keys():
    assert classes(Whole) == {
        "inner": "frozen",
        "inner.rate": "branch",
        "inner.shape": "frozen",
        "maybe": "frozen",
        "maybe.rate": "branch",
        "maybe.shape": "frozen",
        "name": "free",
    }

    class Marked(Section, drift="frozen"):
        """A section whose being there is free."""

        inner: Free[Inner | None] = None
        rate: Branch[int] = 1

    assert classes(Marked)["inner"] == "free" and classes(Marked)["rate"] == "branch"


def test_equal_configs_differ_in_nothing():
    assert compare(Whole, dump(), dump()) == []
    # Python's tuples and JSON's lists are the same.
    assert compare(Whole, Whole(name="a").model_dump(), dump()) == []


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ({}, {"inner": Inner(rate=2)}, Change("inner.rate", 1.0, 2.0, Drift.BRANCH)),
        ({}, {"inner": Inner(shape=(1,))}, Change("inner.shape", [1, 2], [1], Drift.FROZEN)),
        ({}, {"name": "b"}, Change("name", "a", "b", Drift.FREE)),
        ({}, {"maybe": Inner()}, Change("maybe", None, {"rate": 1.0, "shape": [1, 2]}, Drift.FROZEN)),
        ({"maybe": Inner()}, {}, Change("maybe", {"rate": 1.0, "shape": [1, 2]}, None, Drift.FROZEN)),
        ({"maybe": Inner()}, {"maybe": Inner(rate=3)}, Change("maybe.rate", 1.0, 3.0, Drift.BRANCH)),
    ],
)
def test_a_change_is_named(old, new, change):
    assert compare(Whole, dump(**old), dump(**new)) == [change]


def test_an_older_experiment_is_read_with_the_defaults():
    old = dump()
    del old["inner"]["rate"], old["maybe"]
    assert compare(Whole, old, dump()) == []
    assert compare(Whole, old, dump(inner=Inner(rate=2))) == [Change("inner.rate", 1.0, 2.0, Drift.BRANCH)]
    # A whole section may be younger than the file, and a key may be gone since.
    del old["inner"]
    assert compare(Whole, old | {"gone": 1}, dump()) == [Change("gone", 1, ABSENT, Drift.DERIVED)]
    del old["name"]
    assert compare(Whole, old, dump()) == [Change("name", ABSENT, "a", Drift.FREE)]


def test_guarded_values_are_the_frozen_and_branch_ones():
    assert guarded(Whole, dump(maybe=Inner())) == {
        "inner.rate": 1.0,
        "inner.shape": [1, 2],
        "maybe.rate": 1.0,
        "maybe.shape": [1, 2],
    }
    assert "maybe" in guarded(Whole, dump()) and "name" not in guarded(Whole, dump())


def test_facts_of_the_surroundings_are_derived():
    was = {"versions": {"jax": "1", "old": "2"}, "git_commit": "abc"}
    now = {"versions": {"jax": "2", "new": "3"}, "git_commit": "abc"}
    assert derived(was, now) == [
        Change("versions.jax", "1", "2", Drift.DERIVED),
        Change("versions.old", "2", ABSENT, Drift.DERIVED),
        Change("versions.new", ABSENT, "3", Drift.DERIVED),
    ]
