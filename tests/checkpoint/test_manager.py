"""Saving, verifying and restoring: round trips over meshes, damage, failures, the keep policy."""

import pathlib
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from k3train.checkpoint import layout
from k3train.checkpoint import manager as manager_module
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused, SaveFailed
from k3train.checkpoint.manager import CheckpointManager, restore_subtree
from k3train.config.exit_codes import ExitCode

META = {"step": 10, "samples": 320, "tokens": 5120, "config": {"run": {"seed": 0}}, "versions": {"jax": "x"}}


def make_state(sharding, seed=0):
    rng = np.random.default_rng(seed)
    put = lambda x: jax.device_put(x, sharding)  # noqa: E731
    return {
        "params": {
            "embed": {"weight": put(rng.normal(size=(16, 8)).astype(np.float32))},
            "layers": {"w": put(rng.normal(size=(8, 4, 4)).astype(np.float32))},
        },
        "opt": {"momentum": put(jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16))},
        "step": jax.device_put(jnp.asarray(10, jnp.int32)),
    }


def on_four():
    return NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(4), ("fsdp",)), PartitionSpec("fsdp"))


def on_one():
    return SingleDeviceSharding(jax.devices()[0])


def abstract_of(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=on_one() if x.ndim == 0 else (sharding or x.sharding)
        ),
        state,
    )


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


@pytest.fixture
def notes():
    return []


@pytest.fixture
def manager(tmp_path, notes):
    manager = CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=2), note=notes.append)
    yield manager
    manager._pending = None


@pytest.mark.parametrize("first, second", [(on_four, on_one), (on_one, on_four), (on_four, on_four)])
def test_round_trip_onto_another_mesh(manager, first, second):
    state = make_state(first())
    manager.save(10, state, META)
    manager.wait()
    restored, meta = manager.restore(10, abstract_of(state, second()))
    assert same(restored, state)
    assert restored["params"]["embed"]["weight"].sharding == second()
    assert meta == META
    assert manager.latest() == 10 and manager.verify(10) == []


def test_donation_right_after_an_async_save(manager):
    state = make_state(on_four())
    kept = jax.tree.map(np.array, state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)
    manager.save(10, state, META)
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    manager.wait()
    restored, _ = manager.restore(10, abstract_of(kept, on_one()))
    assert same(restored, kept)


def edit(leaf_path, change):
    def apply(tree):
        *branches, last = leaf_path
        for key in branches:
            tree = tree[key]
        change(tree, last)

    return apply


@pytest.mark.parametrize(
    "change, message",
    [
        (
            edit(("params", "extra"), lambda t, k: t.update({k: t["embed"]["weight"]})),
            "missing in the checkpoint: params.extra",
        ),
        (edit(("opt", "momentum"), lambda t, k: t.pop(k)), "not in this model: opt.momentum"),
        (
            edit(("opt", "momentum"), lambda t, k: t.update({k: jax.ShapeDtypeStruct((16, 8), jnp.float32)})),
            r"opt.momentum: stored bfloat16 \[16, 8\], wanted float32 \[16, 8\]",
        ),
        (
            edit(("opt", "momentum"), lambda t, k: t.update({k: jax.ShapeDtypeStruct((8, 16), jnp.bfloat16)})),
            r"opt.momentum: stored bfloat16 \[16, 8\], wanted bfloat16 \[8, 16\]",
        ),
    ],
)
def test_other_arrays_are_refused_by_name(manager, change, message):
    state = make_state(on_one())
    manager.save(10, state, META, block=True)
    abstract = abstract_of(state)
    change(abstract)
    with pytest.raises(CheckpointRefused, match=message) as caught:
        manager.restore(10, abstract)
    assert caught.value.exit_code == ExitCode.CHECKPOINT


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def biggest(folder):
    return max(
        (p for p in pathlib.Path(folder).rglob("*") if p.is_file() and p.name != "manifest.json"),
        key=lambda p: p.stat().st_size,
    )


@pytest.mark.parametrize(
    "damage, word", [(flip, "SHA-256"), (truncate, "bytes"), (lambda path: path.unlink(), "is missing")]
)
def test_damage_is_found_and_the_older_good_step_named(manager, notes, damage, word):
    state = make_state(on_one())
    manager.save(5, state, META, block=True)
    manager.save(10, state, META, block=True)
    victim = biggest(manager.directory / "10")
    damage(victim)
    (fault,) = manager.verify(10)
    assert word in fault and victim.name in fault
    with pytest.raises(CheckpointRefused, match=r"step 5 is good.*@5"):
        manager.restore(10, abstract_of(state))
    assert manager.newest_good() == 5
    assert "WARNING: checkpoint 10" in notes[-1]
    assert same(manager.restore(5, abstract_of(state))[0], state)


def test_a_changed_manifest_is_damage(manager):
    manager.save(10, make_state(on_one()), META, block=True)
    path = manager.directory / "10" / "manifest.json"
    path.write_text(path.read_text().replace('"samples": 320', '"samples": 321'))
    assert "changed" in manager.verify(10)[0]
    path.write_text("{")
    assert "cannot be read" in manager.verify(10)[0]


def test_an_async_failure_surfaces_once(manager, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    state = make_state(on_one())
    manager.save(5, state, META, block=True)
    monkeypatch.setattr(manager_module, "write_manifest", full)
    manager.save(10, state, META)
    with pytest.raises(SaveFailed, match=r"step 10 failed.*No space left") as caught:
        while not manager.poll():
            pass
    assert caught.value.exit_code == ExitCode.SAVE_FAILED and caught.value.step == 10
    assert manager.failures == 1
    assert manager.poll() and manager.steps() == [5]
    monkeypatch.undo()
    manager.save(10, state, META, block=True)  # the leftover is replaced
    assert manager.steps() == [5, 10] and manager.failures == 0


def test_a_failed_save_is_raised_by_the_next_one(manager, monkeypatch):
    monkeypatch.setattr(manager_module, "write_manifest", lambda *a: 1 / 0)
    manager.save(10, make_state(on_one()), META)
    with pytest.raises(SaveFailed, match="division"):
        manager.save(20, make_state(on_one()), META)
    assert manager.steps() == []


def test_a_step_is_never_saved_twice(manager):
    state = make_state(on_one())
    manager.save(10, state, META, block=True)
    with pytest.raises(SaveFailed, match="complete checkpoint already"):
        manager.save(10, state, META)
    assert manager.verify(10) == []


def test_keep_policy(tmp_path):
    manager = CheckpointManager(tmp_path, CheckpointConfig(keep=2, keep_every=40))
    state = make_state(on_one())
    for step in range(10, 80, 10):
        manager.save(step, state, META)
    manager.wait()
    assert manager.steps() == [40, 60, 70]


def test_nothing_is_deleted_before_the_newer_save_is_complete(manager, monkeypatch):
    state, go, really = make_state(on_one()), threading.Event(), manager_module.write_manifest
    manager._config = CheckpointConfig(keep=1)
    manager.save(10, state, META, block=True)
    monkeypatch.setattr(manager_module, "write_manifest", lambda *a: (go.wait(10), really(*a)))
    manager.save(20, state, META)
    assert not manager.poll() and manager.steps() == [10]
    go.set()
    manager.wait()
    assert manager.steps() == [20]


def test_what_is_no_checkpoint_is_ignored(manager):
    manager.save(10, make_state(on_one()), META, block=True)
    (manager.directory / "40").mkdir()
    (manager.directory / "50.orbax-checkpoint-tmp").mkdir()
    (manager.directory / "notes").mkdir()
    (manager.directory / "007").mkdir()
    notes = []
    assert layout.list_steps(manager.directory, notes.append) == [10]
    assert len(notes) == 4
    manager.save(40, make_state(on_one()), META, block=True)  # the empty folder is in nobody's way
    assert manager.steps() == [10, 40]
    assert not (manager.directory / "50.orbax-checkpoint-tmp").exists()
    (manager.directory / "60").mkdir()
    (manager.directory / "60" / "thesis.txt").write_text("mine")
    with pytest.raises(SaveFailed, match="no checkpoint has"):
        manager.save(60, make_state(on_one()), META)
    assert (manager.directory / "60" / "thesis.txt").read_text() == "mine"


def test_retired_steps_can_be_saved_again(manager):
    state = make_state(on_one())
    manager.save(10, state, META, block=True)
    manager.save(20, state, META, block=True)
    manager.retire(10)
    assert manager.steps() == [10]
    manager.save(20, state, META, block=True)
    assert manager.steps() == [10, 20] and (manager.directory / "20.retired-1" / "manifest.json").exists()


def test_should_save(tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    by_steps = CheckpointManager(tmp_path, CheckpointConfig(every=5))
    assert [step for step in range(11) if by_steps.should_save(step, 0.0)] == [5, 10]
    by_time = CheckpointManager(tmp_path, CheckpointConfig(every_minutes=2.0))
    assert by_time.should_save(1, 880.0) and not by_time.should_save(1, 881.0)
    assert not CheckpointManager(tmp_path, CheckpointConfig()).should_save(5, 0.0)


def test_meta_must_be_json(manager):
    with pytest.raises(TypeError):
        manager.save(10, make_state(on_one()), {"config": object()})
    assert not manager.directory.exists()


def test_processes_meet_at_the_barrier(tmp_path):
    names = []
    zero = CheckpointManager(tmp_path, CheckpointConfig(), barrier=names.append)
    zero.save(10, make_state(on_one()), META, block=True)
    assert names == ["checkpoint-10"]


def test_weights_alone(manager):
    state = make_state(on_four())
    manager.save(10, state, META, block=True)
    abstract = abstract_of(state, on_one())["params"]
    params, *rest = restore_subtree(manager.directory, 10, abstract)
    assert same(params, state["params"]) and rest == [[], [], []]
    whole = {"params": abstract, "step": abstract_of(state)["step"]}
    with pytest.raises(CheckpointRefused, match=r"missing in the checkpoint: buffers\.bias"):
        restore_subtree(manager.directory, 10, whole | {"buffers": {"bias": whole["step"]}}, key=None)
    with pytest.raises(CheckpointRefused, match="no arrays under ema"):
        restore_subtree(manager.directory, 10, abstract, key="ema")
    several = whole | {"opt": abstract_of(state, on_one())["opt"]}
    restored, *rest = restore_subtree(manager.directory, 10, several, key=None)
    assert same(restored, {key: state[key] for key in several}) and rest == [[], [], []]


def test_weights_that_fit_in_part(manager):
    state = make_state(on_one())
    manager.save(10, state, META, block=True)
    abstract = {
        "embed": {"weight": jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=on_one())},
        "layers": abstract_of(state)["params"]["layers"],
        "head": jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=on_one()),
    }
    with pytest.raises(CheckpointRefused, match=r"(?s)missing.*head.*embed.weight.*init_partial"):
        restore_subtree(manager.directory, 10, abstract)
    params, missing, unexpected, reshaped = restore_subtree(manager.directory, 10, abstract, partial=True)
    assert list(params) == ["layers"] and same(params["layers"], state["params"]["layers"])
    assert missing == ["head"] and unexpected == [] and reshaped[0].startswith("embed.weight: stored")
    _, _, unexpected, _ = restore_subtree(manager.directory, 10, {"layers": abstract["layers"]}, partial=True)
    assert unexpected == ["embed.weight"]


def test_a_step_that_is_not_there(manager):
    state = make_state(on_one())
    manager.save(10, state, META, block=True)
    manager.save(20, state, META, block=True)
    with pytest.raises(CheckpointRefused, match="no checkpoint of step 15; there: 10, 20"):
        manager.restore(15, abstract_of(state))
    shutil.rmtree(manager.directory / "20")
    assert manager.latest() == 10  # listed anew from storage
