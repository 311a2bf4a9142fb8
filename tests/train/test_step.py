"""The train step: loss normalisation, accumulation, meshes, balancing, clipping."""

from functools import cache, partial

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
from k3train.train.step import build_train_step


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
def _parts(mesh=(("replica", 1),), **changes) -> Assembly:
    """A run's parts; each is a program to compile, so that a test changes several things where it can."""
    sections = {"train": {"global_batch": 8, **{k: v for k, v in changes.items() if k in ("accumulation", "remat")}}}
    sections["model"] = tiny.SHALLOW | ({"mtp": {}} if changes.get("mtp") else {})
    if "qk_clip" in changes:
        sections["optim"] = {"qk_clip": changes["qk_clip"]}
    exp = tiny.experiment(tiny.Path("unused"), mesh=dict(mesh), **sections)
    devices = jax.devices()[: int(np.prod([size for _, size in mesh]))]
    return assemble(exp, build_mesh(exp.mesh, devices))


@cache
def _fresh(parts: Assembly) -> dict:
    return parts.factory.fresh(0)


@cache
def _compiled(parts: Assembly):
    return jax.jit(build_train_step(parts.decoder, parts.optimizer, parts.exp, 10_000))


def _run(parts: Assembly, batch: Batch, state: dict | None = None):
    """One step from the state, by default the parts' fresh one; returns the new state and the outputs."""
    sharding = batch_sharding(parts.mesh)
    with jax.set_mesh(parts.mesh):
        batch = jax.tree.map(lambda a: jax.device_put(a, sharding), batch)
        return _compiled(parts)(state or _fresh(parts), batch, jnp.float32(1000))


def _close(got, want, tolerance):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0) + 1e-12, jax.tree_util.keystr(path)


def test_four_devices_equal_one():
    """The state after one step: per array max|difference| <= 1e-4 max|value|, float32.

    Gradients on every other mesh are tests/parallel/test_parity.py's.
    """
    batch, mesh = _batch(), (("replica", 2), ("fsdp", 2))
    for name in ("params", "buffers"):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), _fresh(_parts(mesh))[name], _fresh(_parts())[name])
    one, one_out = _run(_parts(), batch)
    four, four_out = _run(_parts(mesh), batch)
    _close(four["params"], one["params"], 1e-4)
    _close(four["buffers"], one["buffers"], 1e-4)
    _close(four_out["parts"]["loss"], one_out["parts"]["loss"], 1e-4)
    np.testing.assert_array_equal(four_out["parts"]["load"], one_out["parts"]["load"])
    table = four["params"]["embedding"]["table"]
    assert table.addressable_shards[0].data.shape != table.shape, "fsdp shards nothing"


def test_neither_accumulation_nor_remat_changes_anything():
    """Documents and padding are uneven over microbatches; one global count must weigh them."""
    batch = _batch()
    want, want_out = _run(_parts(), batch)
    got, got_out = _run(_parts(accumulation=4, remat="none"), batch, _fresh(_parts()))
    _close(got["params"], want["params"], 1e-4)
    _close(got["buffers"], want["buffers"], 1e-4)
    for name in ("loss", "load", "max_logit", "accuracy"):
        np.testing.assert_allclose(got_out["parts"][name], want_out["parts"][name], rtol=1e-5)


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
    # With token 5 masked, it is read on the way to 6 and predicted by nothing.
    masked = batch._replace(loss_mask=batch.loss_mask.at[0, 3].set(False))
    np.testing.assert_array_equal(mtp_targets(masked)[1], [[True, False, False, True, True, False]])
    masked = batch._replace(loss_mask=batch.loss_mask.at[0, 4].set(False))  # token 6
    np.testing.assert_array_equal(mtp_targets(masked)[1], [[True, False, False, False, True, False]])
    assert count_tokens(masked) == (4, 3 - 1)


@pytest.fixture(scope="module")
def clipped_mtp() -> tuple[Assembly, dict, dict]:
    """(parts, new state, outputs) of a step with clipping of queries and keys and multi-token prediction."""
    parts = _parts(qk_clip=1e-4, mtp=True)
    return parts, *_run(parts, _batch())


def test_qk_clip_holds_logits(clipped_mtp):
    parts, state, out = clipped_mtp
    before = _fresh(parts)["params"]["layers"]
    assert int(out["clip"]["attn/qk_clip_heads"]) == 4 and float(out["clip"]["attn/qk_clip_min_gamma"]) < 1
    name = next(seg for seg, kinds in before.items() for p in kinds.values() if "kv_b_proj" in p["mixer"])
    old = next(p for p in before[name].values() if "kv_b_proj" in p["mixer"])["mixer"]["kv_b_proj"]
    new = next(p for p in state["params"]["layers"][name].values() if "kv_b_proj" in p["mixer"])["mixer"]["kv_b_proj"]
    keys = np.arange(old.shape[-1]) % 32 < 16  # [nope 16 | value 16] of each head
    assert np.abs(new[..., keys]).max() < 0.5 * np.abs(old[..., keys]).max()
    assert np.abs(new[..., ~keys]).max() > 0.5 * np.abs(old[..., ~keys]).max()


def test_mtp_loss_is_counted_by_its_own_targets(clipped_mtp):
    parts, new, out = clipped_mtp
    state, batch = _fresh(parts), _batch()
    assert float(out["parts"]["mtp_loss"]) == pytest.approx(np.log(259), rel=0.05)

    def loss(params, buffers):
        return batch_loss(parts.decoder, params, buffers, batch, count_tokens(batch), parts.exp.kernels, 0.0)

    total, terms = jax.jit(loss)(state["params"], state["buffers"])
    assert float(terms["mtp_loss"]) == pytest.approx(float(out["parts"]["mtp_loss"]), rel=1e-5)
    assert float(total) == pytest.approx(float(terms["loss"]) + 0.3 * float(terms["mtp_loss"]), rel=1e-6)
    assert "mtp_max_logit" in terms
    moved = new["params"]["mtp_entry"]["projection"] - state["params"]["mtp_entry"]["projection"]
    assert np.abs(moved).max() > 0 and np.abs(jax.tree.leaves(new["buffers"]["mtp_layers"])[0]).max() > 0
