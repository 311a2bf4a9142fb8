"""The optimizer as the step sees it: one battery for every way of updating."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

from k3train.models.param import ParamSpec
from k3train.optim.config import MuonConfig, OptimConfig, ScheduleConfig
from k3train.optim.ema import init_ema, update_ema
from k3train.optim.groups import group_table, render
from k3train.optim.optimizer import Optimizer
from k3train.parallel.axes import param_shardings, replicated
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh

MATRIX = ParamSpec(("embed", "heads"), group="muon", decay=True)
QUERY = ParamSpec(("embed", "heads"), group="muon", heads=2, decay=True)
SPECS = {
    "embed": {"table": ParamSpec(("vocab", "embed"), decay=True)},
    "prefix": {0: {"norm": ParamSpec(("embed",)), "up": MATRIX}},
    "period": {0: {"norm": ParamSpec(("embed",)), "q": QUERY},
               1: {"up": MATRIX, "experts": ParamSpec(("experts", "latent", "mlp"), group="muon", decay=True)}},
    "empty": {},
}  # fmt: skip
SHAPES = {
    "embed": {"table": (12, 8)},
    "prefix": {0: {"norm": (8,), "up": (8, 12)}},
    "period": {0: {"norm": (3, 8), "q": (3, 8, 16)}, 1: {"up": (3, 8, 12), "experts": (3, 4, 8, 4)}},
    "empty": {},
}


def is_shape(x):
    return isinstance(x, tuple)


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(scale * rng.standard_normal(s), jnp.float32), SHAPES, is_leaf=is_shape
    )  # fmt: skip


def config(**changes):
    fields = {"schedule": ScheduleConfig(kind="constant", warmup=0.0), "clip_norm": None,
              "muon": MuonConfig(lr=0.05, dtype="float32", weight_decay=0.0),
              "adamw": {"lr": 0.02, "weight_decay": 0.0}}  # fmt: skip
    return OptimConfig(**(fields | changes))


def allclose(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)


class Battery:
    """What every way of updating must do."""

    cfg: OptimConfig
    tolerance = 2e-5
    """Between one device and four."""

    def step(self):
        return jax.jit(Optimizer(self.cfg, SPECS).update)

    def test_converges_on_a_quadratic(self):
        goal, params = draw(1, 0.3), draw(2, 0.3)
        state, step = Optimizer(self.cfg, SPECS).init(params), self.step()
        grads = jax.jit(lambda p: jax.tree.map(jnp.subtract, p, goal))
        start = float(optax.tree.norm(grads(params)))
        for i in range(150):
            # Linear fall to zero: sign-like updates of fixed size cannot settle otherwise.
            params, state, _ = step(grads(params), state, params, jnp.float32(i + 1), 150.0)
        assert float(optax.tree.norm(grads(params))) < 0.05 * start

    def test_forms_and_dtypes_are_kept(self):
        params, opt = draw(1), Optimizer(self.cfg, SPECS)
        state = opt.init(params)
        new_params, new_state, metrics = jax.eval_shape(opt.update, params, state, params, 1.0, 10.0)
        for old, new in ((params, new_params), (state, new_state)):
            assert jax.tree.structure(old) == jax.tree.structure(new)
            assert [(x.shape, x.dtype) for x in jax.tree.leaves(old)] == [
                (x.shape, x.dtype) for x in jax.tree.leaves(new)
            ]
        assert all(m.shape == () and m.dtype == jnp.float32 for m in metrics.values())
        per_array = sum(x.size for x in jax.tree.leaves(params))
        assert sum(x.size for x in jax.tree.leaves(state)) >= per_array

    def test_equal_on_four_devices(self):
        mesh = build_mesh(MeshConfig(replica=2, fsdp=2))
        opt, params, grads = Optimizer(self.cfg, SPECS), draw(1), draw(2)
        state = opt.init(params)
        want = self.step()(grads, state, params, jnp.float32(1), 10.0)
        shardings = param_shardings(mesh, params, SPECS)
        state_shardings = opt.arrange(shardings, replicated(mesh))
        placed = jax.device_put(params, shardings)
        with jax.set_mesh(mesh):
            got = self.step()(jax.device_put(grads, shardings), jax.device_put(state, state_shardings), placed,
                              jnp.float32(1), 10.0)  # fmt: skip
        allclose(got, want, self.tolerance)
        assert not shardings["period"][0]["q"].is_fully_replicated
        for tree, expected in ((got[0], shardings), (got[1], state_shardings)):
            kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), tree, expected)
            assert all(jax.tree.leaves(kept)), kept


class TestMuon(Battery):
    cfg = config(schedule=ScheduleConfig(kind="wsd", warmup=0.0, decay=0.9, final=0.0))


class TestAdamW(Battery):
    cfg = config(matrices="adamw", schedule=ScheduleConfig(kind="wsd", warmup=0.0, decay=0.9, final=0.0))


class TestBfloat16Muon(Battery):
    cfg = config(muon=MuonConfig(lr=0.05, dtype="bfloat16", weight_decay=0.0),
                 schedule=ScheduleConfig(kind="wsd", warmup=0.0, decay=0.9, final=0.0))  # fmt: skip
    tolerance = 5e-3


def test_adamw_equals_optax():
    cfg = config(matrices="adamw", adamw={"lr": 0.01, "weight_decay": 0.3})
    params, opt = draw(1), Optimizer(cfg, SPECS)
    decays = jax.tree.map(lambda s: s.decay, SPECS, is_leaf=lambda x: isinstance(x, ParamSpec))
    theirs = optax.adamw(0.01, 0.9, 0.95, 1e-8, weight_decay=0.3, mask=decays)
    state, their_state, their_params = opt.init(params), theirs.init(params), params
    step, their_step = jax.jit(opt.update), jax.jit(theirs.update)
    for i in range(3):
        grads = draw(10 + i)
        params, state, _ = step(grads, state, params, 1.0, 10.0)
        with jax.numpy_dtype_promotion("standard"):
            updates, their_state = their_step(grads, their_state, their_params)
        their_params = optax.apply_updates(their_params, updates)
    allclose(params, their_params)


def test_clip_and_metrics():
    params, grads = draw(1), draw(2, 5.0)
    norm = float(optax.tree.norm(grads))
    unclipped, clipped = Optimizer(config(), SPECS), Optimizer(config(clip_norm=0.5), SPECS)
    small = jax.tree.map(lambda g: g * (0.5 / norm), grads)
    got, state, metrics = jax.jit(clipped.update)(grads, clipped.init(params), params, 1.0, 10.0)
    want, want_state, plain = jax.jit(unclipped.update)(small, unclipped.init(params), params, 1.0, 10.0)
    allclose((got, state), (want, want_state))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert float(metrics["grad_norm_clipped"]) == pytest.approx(0.5, rel=1e-5)
    assert float(plain["grad_norm_clipped"]) == pytest.approx(0.5, rel=1e-5)
    assert float(metrics["lr/muon"]) == pytest.approx(0.05) and float(metrics["lr/adamw"]) == pytest.approx(0.02)
    change = [np.ravel(got["period"][i][k] - params["period"][i][k]) for i, k in ((0, "q"), (1, "up"), (1, "experts"))]
    change.append(np.ravel(got["prefix"][0]["up"] - params["prefix"][0]["up"]))
    rms = np.sqrt(np.mean(np.concatenate(change) ** 2))
    assert float(metrics["update_rms/muon"]) == pytest.approx(rms, rel=1e-3)


def test_group_table_covers_every_array_once():
    params = draw(1)
    rows = group_table(params, SPECS, OptimConfig())
    assert sum(row.elements for row in rows) == sum(x.size for x in jax.tree.leaves(params))
    assert sum(row.arrays for row in rows) == 1 + 2 + 3 * 4  # the stack's three layers count each
    names = [name for row in rows for name in row.names]
    assert sorted(names) == ["embed.table", "period.*.experts", "period.*.norm", "period.*.q", "period.*.up",
                             "prefix.*.norm", "prefix.*.up"]  # fmt: skip
    by_key = {(row.group, row.heads, row.weight_decay) for row in rows}
    assert by_key == {("muon", 2, 0.1), ("muon", 1, 0.1), ("adamw", 1, 0.1), ("adamw", 1, 0.0)}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(rows))
    assert "experts" in console.export_text()


def test_no_head_blocks_where_switched_off():
    rows = group_table(draw(1), SPECS, OptimConfig(muon=MuonConfig(per_head=False)))
    assert {row.heads for row in rows} == {1}
    rows = group_table(draw(1), SPECS, OptimConfig(matrices="adamw"))
    assert {row.group for row in rows} == {"adamw"}


def test_array_without_spec_is_named():
    params = draw(1)
    params["prefix"][0]["stray"] = jnp.zeros(3)
    with pytest.raises(ValueError, match=r"prefix\.0\.stray"):
        Optimizer(config(), SPECS).init(params)


def test_ema():
    first, second = draw(1), draw(2)
    average = update_ema(init_ema(first), second, 0.75)
    allclose(average, jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, first, second))
