"""Nothing damaged, torn or foreign is ever loaded: the newest good checkpoint is, and what was passed over is named."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from small_state import META, abstract_of, biggest, flip, make_state, same, truncate

from k3train.checkpoint import manager as manager_module
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.resolve import resolve_resume
from k3train.config.exit_codes import ExitCode


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with steps 5 and 10, of different values."""
    manager = CheckpointManager(tmp_path_factory.mktemp("run") / "checkpoints", CheckpointConfig(keep=9))
    for step in (5, 10):
        manager.save(step, make_state(seed=step), META | {"run_id": "mine"}, block=True)
    return manager.directory


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


DAMAGE = {
    "bit flip": lambda folder: flip(biggest(folder)),
    "truncated": lambda folder: truncate(biggest(folder)),
    "missing file": lambda folder: biggest(folder).unlink(),
    "manifest changed": lambda folder: rewrite(
        folder / "manifest.json", lambda content: content["meta"].update(samples=1)
    ),
    "manifest torn": lambda folder: os.truncate(folder / "manifest.json", 500),
    "another format": lambda folder: rewrite(folder / "manifest.json", lambda content: content.update(format=1)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_quarantined_and_the_older_one_taken(directory, damage):
    DAMAGE[damage](directory / "10")
    notes = []
    manager = CheckpointManager(directory, CheckpointConfig(), note=notes.append)
    faults = manager.verify(10)
    assert len(faults) == 1
    with pytest.raises(CheckpointRefused, match=r"damaged and was not loaded(.|\n)*step 5 is good.*@5") as caught:
        manager.restore(10, abstract_of(make_state()))
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    assert manager.newest_good() == 5
    assert "WARNING: checkpoint 10" in notes[-1] and faults[0] in notes[-1]
    assert json.loads((directory / "10" / "quarantined.json").read_text())["reason"] == faults[0]
    assert manager.steps() == [5] and resolve_resume("auto", directory.parent).step == 5
    state, meta = manager.restore(5, abstract_of(make_state()))
    assert same(state, make_state(seed=5)) and meta["samples"] == 320
    # Going on from there saves step 10 again, beside the quarantined one.
    manager.save(10, make_state(seed=11), META, block=True)
    assert manager.steps() == [5, 10] and (directory / "10-2" / "manifest.json").exists()
    assert same(manager.restore(10, abstract_of(make_state()))[0], make_state(seed=11))
    assert (directory / "10" / "quarantined.json").exists()


def test_every_bit_counts(directory):
    """Single flipped bits all over the array files: each is found (Orbax finds none of them by itself)."""
    manager, rng = CheckpointManager(directory, CheckpointConfig()), np.random.default_rng(0)
    victim = biggest(directory / "10")
    whole = victim.read_bytes()
    for _ in range(40):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        victim.write_bytes(content)
        assert manager.verify(10)


def foreign_orbax(folder):
    ocp.save(str(folder), make_state(seed=3))


def of_another_run(folder):
    other = CheckpointManager(folder.parent.parent / "other", CheckpointConfig())
    other.save(int(folder.name), make_state(seed=3), META | {"run_id": "theirs"}, block=True)
    shutil.copytree(other.directory / folder.name, folder)


def renamed(folder):
    shutil.copytree(folder.parent / "5", folder)


def with_text(folder):
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")


def torn(folder):
    shutil.copytree(folder.parent / "10", folder)
    (folder / "manifest.json").unlink()
    (folder.parent / f"{folder.name}.saving.json").write_text("{}")


FOREIGN = {
    "empty folder": lambda folder: folder.mkdir(),
    "Orbax without a manifest": foreign_orbax,
    "another run's": of_another_run,
    "a renamed step": renamed,
    "a folder of texts": with_text,
    "a torn save": torn,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint_of_this_run_is_not_loaded(directory, kind):
    FOREIGN[kind](directory / "40")
    notes = []
    manager = CheckpointManager(directory, CheckpointConfig(), run_id="mine", note=notes.append)
    assert manager.steps() == [5, 10] and manager.newest_good() == 10
    with pytest.raises(CheckpointRefused, match="no checkpoint of step 40; there: 5, 10"):
        manager.restore(40, abstract_of(make_state()))
    # It is in nobody's way either; what no save of ours wrote is left alone.
    manager.save(40, make_state(seed=40), META | {"run_id": "mine"}, block=True)
    assert manager.steps() == [10, 40]
    ours = kind in ("empty folder", "a torn save")
    assert (directory / "40-2").exists() != ours
    if kind == "a folder of texts":
        assert (directory / "40" / "thesis.txt").read_text() == "mine"


def test_a_storage_outage_does_not_rewind_a_week(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=9, max_fallback=2))
    for step in range(1, 6):
        manager.save(step, make_state(), META, block=True)
    for step in (3, 4, 5):
        flip(biggest(manager.directory / str(step)))
    for _ in range(2):  # starting again does not creep further back
        again = CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=9, max_fallback=2))
        with pytest.raises(CheckpointRefused, match=r"checkpoints/3 is damaged, and so are the 2 newer ones") as caught:
            again.newest_good()
        assert caught.value.exit_code == ExitCode.CHECKPOINT
        assert again.steps() == [1, 2, 3]
    assert CheckpointManager(manager.directory, CheckpointConfig(max_fallback=3)).newest_good() == 2


def test_a_run_whose_checkpoints_are_all_bad_does_not_start_anew(directory):
    for step in ("5", "10"):
        flip(directory / step / "manifest.json")
    for resume in ("auto", "must"):
        with pytest.raises(CheckpointRefused, match=r"none that can be used(.|\n)*damaged"):
            resolve_resume(resume, directory.parent)
    assert CheckpointManager(directory, CheckpointConfig()).newest_good() is None
    with pytest.raises(CheckpointRefused, match=r"none that can be used(.|\n)*quarantined"):
        resolve_resume("auto", directory.parent)


@pytest.mark.parametrize("wrong", ["dtype", "shape"])
def test_another_dtype_or_shape_is_refused_before_orbax_casts(directory, wrong):
    abstract = abstract_of(make_state())
    shape, dtype = ((16, 8), jnp.float32) if wrong == "dtype" else ((8, 16), jnp.bfloat16)
    abstract["opt"]["momentum"] = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(CheckpointRefused, match=r"opt.momentum: stored bfloat16 \[16, 8\], wanted"):
        CheckpointManager(directory, CheckpointConfig()).restore(10, abstract)


def test_a_state_that_came_back_otherwise_is_refused(directory, monkeypatch):
    """Files as written, but a resharding that swaps two shards: only the state's hash can see it."""
    really = manager_module.read_all

    def swapped(folder, abstract):
        tree = really(folder, abstract)
        tree["params"]["embed"]["weight"] = jnp.roll(tree["params"]["embed"]["weight"], 4, axis=0)
        return tree

    monkeypatch.setattr(manager_module, "read_all", swapped)
    with pytest.raises(CheckpointRefused, match=r"came back wrong(.|\n)*params.embed.weight: other values") as caught:
        CheckpointManager(directory, CheckpointConfig()).restore(10, abstract_of(make_state()))
    assert "layers" not in str(caught.value)


def test_later_steps_are_set_aside_and_can_be_saved_again(directory):
    manager = CheckpointManager(directory, CheckpointConfig())
    manager.retire(5)
    assert manager.steps() == [5] and resolve_resume("auto", directory.parent).step == 5
    manager.save(10, make_state(seed=1), META, block=True)
    manager.retire(5)
    manager.save(10, make_state(seed=2), META, block=True)
    assert manager.steps() == [5, 10] and (directory / "10-3" / "manifest.json").exists()
    assert same(manager.restore(10, abstract_of(make_state()))[0], make_state(seed=2))
    for name in ("10", "10-2"):
        assert "went on from step 5" in json.loads((directory / name / "retired.json").read_text())["reason"]
