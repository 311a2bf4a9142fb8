"""The guard inside the train step, and the hash of what it read."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3train.data.batch import Batch, batch_hash, hash_text
from k3train.parallel.axes import batch_sharding
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh
from k3train.train.assembly import assemble
from k3train.train.step import batch_facts, compile_step


def _batch(rows: int = 4, length: int = 32) -> Batch:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 256, (rows, length)).astype(np.int32)
    ids = np.sort(rng.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
    ids[1, 20:] = 0
    mask = (np.roll(ids, -1, 1) == ids) & (ids > 0)
    mask[:, -1] = False
    return Batch(tokens, np.where(mask, np.roll(tokens, -1, 1), 0).astype(np.int32), ids, mask)


@cache
def _parts():
    guard = {"spikes": "skip", "warmup_steps": 1, "window": 8, "loss_sigma": 3.0, "update_sigma": 3.0}
    exp = tiny.experiment(tiny.Path("unused"), model=tiny.SHALLOW, optim={"ema": 0.5, "qk_clip": 1e-4, "guard": guard})
    return assemble(exp, build_mesh(exp.mesh, jax.devices()[:1]))


@cache
def _step():
    parts = _parts()
    with jax.set_mesh(parts.mesh):
        return compile_step(parts)


def _run(state: dict):
    """One step; the given state is used up."""
    parts = _parts()
    sharding = batch_sharding(parts.mesh)
    with jax.set_mesh(parts.mesh):
        batch = Batch(*(jax.device_put(a, sharding) for a in _batch()))
        return _step()(state, batch, jnp.float32(1000))


def _host(state: dict) -> dict:
    return jax.tree.map(np.array, state)


def _assert_unchanged(new: dict, old: dict):
    """All but the step count and the list of skipped steps."""
    old["guard"]["skipped_steps"] = np.roll(old["guard"]["skipped_steps"], 1)
    old["guard"]["skipped_steps"][0] = old["step"] + 1
    old["step"] = old["step"] + 1
    jax.tree.map(np.testing.assert_array_equal, _host(new), old)


def test_a_step_that_is_not_finite_changes_nothing_but_the_count():
    state = _parts().factory.fresh(0)
    head = state["params"]["head"]["weight"]
    state["params"]["head"]["weight"] = jax.device_put(np.array(head) * np.nan, head.sharding)
    old = _host(state)
    new, out = _run(state)
    assert float(out["optim"]["nonfinite"]) == float(out["optim"]["skipped"]) == 1 and not out["halt"]
    _assert_unchanged(new, old)


def test_a_skipped_spike_changes_nothing_but_the_count():
    """One calm step, then one whose update is far larger than the statistics know."""
    state, out = _run(_parts().factory.fresh(0))
    assert float(out["optim"]["skipped"]) == 0 and int(state["guard"]["accepted"]) == 1
    assert float(state["guard"]["loss"]["mean"]) == pytest.approx(float(out["parts"]["loss"]))
    for group, statistic in state["guard"]["update"].items():
        assert float(statistic["mean"]) == pytest.approx(float(out["optim"][f"update_norm/{group}"]))
    muon = state["guard"]["update"]["muon"]
    muon["mean"] = jax.device_put(np.float32(muon["mean"]) / 2, muon["mean"].sharding)
    old = _host(state)
    new, out = _run(state)
    assert float(out["optim"]["spike"]) == float(out["optim"]["skipped"]) == 1
    assert float(out["guard"]["update_deviation/muon"]) > 3 > float(out["guard"]["update_deviation/adamw"])
    _assert_unchanged(new, old)


def test_an_accepted_step_reports_the_norm_of_its_weights():
    state, out = _run(_parts().factory.fresh(0))
    norm = np.sqrt(sum(np.sum(np.float64(a) ** 2) for a in jax.tree.leaves(_host(state["params"]))))
    assert float(out["optim"]["param_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(out["parts"]["supervised"]) == _batch().loss_mask.sum()


def test_the_devices_hash_what_the_host_hashes():
    """Whole, and over four devices; and it sees one id, one document and one pair of rows exchanged."""
    batch = _batch()
    sharding = batch_sharding(build_mesh(MeshConfig()))
    facts = jax.jit(batch_facts)
    got = facts(Batch(*(jax.device_put(a, sharding) for a in batch)))
    assert hash_text(jax.device_get(got["hash"])) == batch_hash(batch) == hash_text(facts(batch)["hash"])
    assert all(a.sharding.is_fully_replicated for a in got.values()), "every process must be able to read it"
    assert float(got["pad_frac"]) == pytest.approx(np.mean(batch.segment_ids == 0))
    assert float(got["docs_per_row"]) == pytest.approx(np.mean(batch.segment_ids.max(axis=1)))
    other, moved = batch.tokens.copy(), batch.segment_ids.copy()
    other[2, 5] ^= 1
    moved[0, 3] += 1
    changed = (
        batch._replace(tokens=other),
        batch._replace(segment_ids=moved),
        Batch(*(a[[1, 0, 2, 3]] for a in batch)),
    )
    assert len({batch_hash(b) for b in (batch, *changed)}) == 4
