"""The train step: loss normalisation, accumulation, meshes, balancing, clipping."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3train.data.batch import Batch
from k3train.parallel.axes import batch_sharding
from k3train.parallel.mesh import build_mesh
from k3train.train.assembly import Assembly, assemble
from k3train.train.loss import batch_loss, count_tokens, mtp_targets
from k3train.train.step import build_train_step, gradients


def _batch(rows: int = 8, length: int = 32, seed: int = 0) -> Batch:
    """Rows of several documents and some padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
    ids[1, 20:] = 0
    targets = np.roll(tokens, -1, 1)
    mask = (np.roll(ids, -1, 1) == ids) & (ids > 0)
    mask[:, -1] = False
    return Batch(*map(jnp.asarray, (tokens, np.where(mask, targets, 0), ids, mask)))


@cache
def _parts(mesh=(("replica", 1),), deep: bool = False, **train) -> Assembly:
    """A run's parts; ``deep`` has layers enough for a scanned stack, else there is one of each kind."""
    sections = {"train": {"global_batch": 8, **{k: v for k, v in train.items() if k in ("accumulation", "remat")}}}
    sections["model"] = (tiny.MODEL if deep else tiny.SHALLOW) | ({"mtp": {}} if train.get("mtp") else {})
    if "qk_clip" in train:
        sections["optim"] = {"qk_clip": train["qk_clip"]}
    exp = tiny.experiment(tiny.Path("unused"), mesh=dict(mesh), **sections)
    devices = jax.devices()[: int(np.prod([size for _, size in mesh]))]
    return assemble(exp, build_mesh(exp.mesh, devices))


@cache
def _compiled(parts: Assembly):
    return jax.jit(build_train_step(parts.decoder, parts.optimizer, parts.exp, 10_000))


def _run(parts: Assembly, batch: Batch):
    """One step from the fresh state; returns the new state and the outputs."""
    sharding = batch_sharding(parts.mesh)
    with jax.set_mesh(parts.mesh):
        batch = jax.tree.map(lambda a: jax.device_put(a, sharding), batch)
        return _compiled(parts)(parts.factory.fresh(0), batch, jnp.float32(1000))


def _close(got, want, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0) + 1e-12, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "mesh", [(("replica", 4),), (("replica", 1), ("fsdp", 4)), (("replica", 2), ("fsdp", 2))], ids=str
)
def test_four_devices_equal_one(mesh):
    """The state after one step: per array max|difference| <= 1e-4 max|value|, float32."""
    batch = _batch()
    one, one_out = _run(_parts(), batch)
    four, four_out = _run(_parts(mesh), batch)
    _close(four["params"], one["params"], 1e-4)
    _close(four["buffers"], one["buffers"], 1e-4)
    _close(four_out["parts"]["loss"], one_out["parts"]["loss"], 1e-4)
    np.testing.assert_array_equal(four_out["parts"]["load"], one_out["parts"]["load"])
    if dict(mesh).get("fsdp"):
        table = four["params"]["embedding"]["table"]
        assert table.addressable_shards[0].data.shape != table.shape, "fsdp shards nothing"


def test_four_devices_give_the_gradients_of_one():
    def grads(parts: Assembly):
        sharding = batch_sharding(parts.mesh)
        with jax.set_mesh(parts.mesh):
            state = parts.factory.fresh(0)
            batch = jax.tree.map(lambda a: jax.device_put(a, sharding), _batch())
            return jax.jit(lambda s, b: gradients(parts.decoder, parts.exp, s["params"], s["buffers"], b)[0])(
                state, batch
            )

    _close(grads(_parts((("replica", 2), ("fsdp", 2)), deep=True)), grads(_parts(deep=True)), 1e-4)


def test_accumulation_equals_the_whole_batch():
    """Documents and padding are uneven over microbatches; one global count must weigh them."""
    batch = _batch()
    want, want_out = _run(_parts(), batch)
    got, got_out = _run(_parts(accumulation=4), batch)
    _close(got["params"], want["params"], 1e-4)
    _close(got["buffers"], want["buffers"], 1e-4)
    for name in ("loss", "load", "max_logit", "accuracy"):
        np.testing.assert_allclose(got_out["parts"][name], want_out["parts"][name], rtol=1e-5)


def test_remat_changes_nothing():
    batch = _batch()
    _close(_run(_parts(remat="none"), batch)[0]["params"], _run(_parts(), batch)[0]["params"], 1e-4)


def test_no_supervised_token_is_no_loss_and_no_nan():
    batch = _batch()._replace(loss_mask=jnp.zeros((8, 32), bool))
    state, out = _run(_parts(), batch)
    assert float(out["parts"]["loss"]) == 0 and float(out["parts"]["supervised"]) == 0
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(state["params"]))


def test_router_bias_moves_and_is_centred():
    state, out = _run(_parts(), _batch())
    for bias in jax.tree.leaves(state["buffers"]):
        assert np.abs(bias).max() > 0 and abs(float(bias.mean())) < 1e-5
    np.testing.assert_array_equal(out["router_bias"].shape, (1, 8))


def test_qk_clip_holds_logits():
    parts = _parts(qk_clip=1e-4)
    before = parts.factory.fresh(0)["params"]["layers"]
    state, out = _run(parts, _batch())
    assert int(out["clip"]["attn/qk_clip_heads"]) == 2 and float(out["clip"]["attn/qk_clip_min_gamma"]) < 1
    name = next(seg for seg, kinds in before.items() for p in kinds.values() if "kv_b_proj" in p["mixer"])
    old = next(p for p in before[name].values() if "kv_b_proj" in p["mixer"])["mixer"]["kv_b_proj"]
    new = next(p for p in state["params"]["layers"][name].values() if "kv_b_proj" in p["mixer"])["mixer"]["kv_b_proj"]
    keys = np.arange(old.shape[-1]) % 32 < 16  # [nope 16 | value 16] of each head
    assert np.abs(new[..., keys]).max() < 0.5 * np.abs(old[..., keys]).max()
    assert np.abs(new[..., ~keys]).max() > 0.5 * np.abs(old[..., ~keys]).max()


def test_mtp_targets_stay_in_their_document():
    batch = Batch(
        tokens=jnp.asarray([[1, 2, 3, 4, 5, 6]]),
        targets=jnp.asarray([[2, 3, 0, 5, 6, 7]]),
        segment_ids=jnp.asarray([[1, 1, 1, 2, 2, 2]]),
        loss_mask=jnp.asarray([[True, True, False, True, True, True]]),
    )
    targets, mask = mtp_targets(batch)
    np.testing.assert_array_equal(mask, [[True, False, False, True, True, False]])
    np.testing.assert_array_equal(np.where(mask, targets, 0), [[3, 0, 0, 6, 7, 0]])


def test_mtp_loss_is_counted_by_its_own_targets():
    parts = _parts(mtp=True)
    state, batch = parts.factory.fresh(0), _batch()
    total, out = batch_loss(
        parts.decoder, state["params"], state["buffers"], batch, count_tokens(batch), parts.exp.kernels, 0.0
    )
    assert float(out["mtp_loss"]) == pytest.approx(np.log(259), rel=0.05)
    assert float(total) == pytest.approx(float(out["loss"]) + 0.3 * float(out["mtp_loss"]), rel=1e-6)
    assert "mtp_max_logit" in out
    new, _ = _run(parts, batch)
    moved = new["params"]["mtp_entry"]["projection"] - state["params"]["mtp_entry"]["projection"]
    assert np.abs(moved).max() > 0 and np.abs(jax.tree.leaves(new["buffers"]["mtp_layers"])[0]).max() > 0
