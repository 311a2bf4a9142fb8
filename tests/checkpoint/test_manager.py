"""Saving and restoring: round trips over meshes, arrays that do not fit, parts of a state."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_state import META, abstract_of, make_state, on_four, on_one, same

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.subtree import restore_subtree
from k3train.config.exit_codes import ExitCode


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


def test_meta_must_be_json(manager):
    with pytest.raises(TypeError):
        manager.save(10, make_state(on_one()), {"config": object()})
    assert not manager.directory.exists()


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
