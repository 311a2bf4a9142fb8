"""The guard's arithmetic, without a model: statistics, spikes, policies, counts."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from k3train.optim.config import GUARD_MEMORY, GuardConfig
from k3train.optim.guard import SIGMA_FLOOR, init_guard, judge

CALM = GuardConfig(window=16, warmup_steps=8)


@cache
def _judge(cfg: GuardConfig):
    return jax.jit(lambda *args: judge(cfg, *args))


class Run:
    """Judges one step after the other."""

    def __init__(self, cfg: GuardConfig):
        self.cfg, self.step = cfg, 0
        self.state = init_guard(("muon", "adamw"))

    def __call__(self, loss: float, grad: float = 1.0, muon: float = 1.0, adamw: float = 1.0):
        self.step += 1
        norms = {"muon": jnp.float32(muon), "adamw": jnp.float32(adamw)}
        old = self.state
        verdict = _judge(self.cfg)(old, jnp.int32(self.step), jnp.float32(loss), jnp.float32(grad), norms)
        self.state = verdict.state
        if not verdict.accept:
            for name in ("accepted", "loss", "update"):
                jax.tree.map(np.testing.assert_array_equal, self.state[name], old[name])
        return verdict

    def calm(self, steps: int = 20, seed: int = 0):
        for value in np.random.default_rng(seed).normal(4, 0.1, steps):
            assert not self(value).flags["spike"]
        return self


def flags(verdict) -> set[str]:
    return {name for name, value in verdict.flags.items() if value}


@pytest.mark.parametrize("window", [2, 16, 1000])
def test_mean_and_variance_equal_the_weighted_sums(window: int):
    """Against the definition in float64: weights (1 - 1/W)^age over all accepted values, normalised."""
    run = Run(GuardConfig(window=window, loss_sigma=None, update_sigma=None))
    values = np.random.default_rng(1).normal(3, 0.5, 40).astype(np.float32)
    for value in values:
        run(value, muon=10 * value)
    weights = (1 - 1 / window) ** np.arange(len(values))[::-1]
    mean = np.average(values.astype(np.float64), weights=weights)
    variance = np.average((values - mean) ** 2, weights=weights)
    assert float(run.state["loss"]["mean"]) == pytest.approx(mean, rel=1e-5)
    assert float(run.state["loss"]["variance"]) == pytest.approx(variance, rel=1e-4)
    assert float(run.state["update"]["muon"]["mean"]) == pytest.approx(10 * mean, rel=1e-5)
    assert int(run.state["accepted"]) == len(values)


@pytest.mark.parametrize("fault", [{"loss": np.nan}, {"loss": np.inf}, {"loss": 4, "grad": np.nan},
                                   {"loss": 4, "grad": np.inf}])  # fmt: skip
def test_what_is_not_finite_is_skipped_from_the_first_step_on(fault: dict):
    for run in (Run(CALM), Run(CALM).calm()):
        verdict = run(**fault, muon=np.nan)
        assert flags(verdict) == {"nonfinite", "skipped"} and not verdict.halt
        assert int(run.state["skipped_steps"][0]) == run.step
        assert not flags(run(4.0)), "one bad step spoils no later one"
    halted = Run(CALM.model_copy(update={"nonfinite": "halt"}))(**fault)
    assert halted.halt and "skipped" in flags(halted)


@pytest.mark.parametrize("spike", [{"loss": 6.0}, {"loss": 4.0, "muon": 2.0}, {"loss": 4.0, "adamw": 2.0},
                                   {"loss": 4.0, "adamw": np.inf}], ids=str)  # fmt: skip
def test_spikes_by_policy(spike: dict):
    expected = {"warn": ({"spike"}, False), "skip": ({"spike", "skipped"}, False), "halt": ({"spike", "skipped"}, True)}
    for policy, (flagged, halt) in expected.items():
        verdict = Run(CALM.model_copy(update={"spikes": policy})).calm()(**spike)
        assert (flags(verdict), bool(verdict.halt)) == (flagged, halt), policy
        assert bool(verdict.accept) == (policy == "warn")
    off = Run(CALM.model_copy(update={"loss_sigma": None, "update_sigma": None})).calm()(**spike)
    assert not flags(off)


def test_the_limit_is_where_it_is_said_to_be():
    run = Run(CALM).calm()
    mean, sigma = float(run.state["loss"]["mean"]), float(run.state["loss"]["variance"]) ** 0.5
    assert sigma > SIGMA_FLOOR * mean
    below, above = (Run(CALM).calm()(mean + k * sigma) for k in (5.95, 6.05))
    assert not flags(below) and flags(above) == {"spike"}
    assert float(above.measures["loss_deviation"]) == pytest.approx(6.05, rel=1e-3)
    assert not flags(Run(CALM).calm()(mean - 20 * sigma)), "a fall is no spike"


def test_a_steady_quantity_may_vary_by_the_floor():
    def run():
        steady = Run(CALM)
        for _ in range(20):
            steady(4.0)
        return steady

    assert not flags(run()(4.0 * (1 + 5.9 * SIGMA_FLOOR)))
    assert flags(run()(4.0 * (1 + 6.1 * SIGMA_FLOOR))) == {"spike"}


def test_nothing_is_a_spike_while_warming_up():
    run = Run(CALM)
    for i in range(8):
        assert not flags(run(4.0 if i else 40.0))


def test_a_warned_spike_hides_no_other_and_a_new_level_is_learnt():
    run = Run(CALM).calm()
    assert flags(run(1e6)) == {"spike"} and flags(run(8.0)) == {"spike"}
    steps = 0
    while flags(run(8.0)):
        steps += 1
    assert steps < 3 * CALM.window
    assert float(run.state["loss"]["mean"]) < 9


def test_an_update_norm_that_is_not_finite_does_not_spoil_the_statistics():
    run = Run(CALM).calm()
    run(4.0, muon=np.nan)
    assert np.isfinite(float(run.state["update"]["muon"]["mean"])) and not flags(run(4.0))


def test_too_many_in_a_row_end_the_run():
    run = Run(CALM.model_copy(update={"max_in_a_row": 2}))
    assert [bool(run(np.nan).halt) for _ in range(4)] == [False, False, True, True]
    assert float(run(4.0).measures["skipped_in_a_row"]) == 0
    assert [bool(run(np.nan).halt) for _ in range(2)] == [False, False]
    assert [bool(Run(CALM.model_copy(update={"max_in_a_row": 0}))(np.nan).halt)] == [True]


def test_too_many_in_the_window_end_the_run_but_only_at_a_skipped_step():
    run = Run(CALM.model_copy(update={"max_in_window": 3}))
    halts = [bool(run(np.nan if step % 2 else 4.0).halt) for step in range(1, 11)]
    assert halts == [False] * 6 + [True, False, True, False]
    for _ in range(CALM.window):
        verdict = run(4.0)
    assert float(verdict.measures["skipped_in_window"]) == 0 and not run(np.nan).halt


def test_the_counts_hold_up_to_the_memory_and_past_it():
    run = Run(GuardConfig(window=1000, max_in_a_row=GUARD_MEMORY - 1, max_in_window=GUARD_MEMORY - 1))
    verdicts = [run(np.nan) for _ in range(GUARD_MEMORY + 3)]
    assert [bool(v.halt) for v in verdicts] == [False] * (GUARD_MEMORY - 1) + [True] * 4
    assert float(verdicts[-1].measures["skipped_in_a_row"]) == GUARD_MEMORY
    for limits in ({"max_in_a_row": GUARD_MEMORY}, {"max_in_window": GUARD_MEMORY}, {"window": 1}, {"loss_sigma": 0.0}):
        with pytest.raises(ValidationError):
            GuardConfig.model_validate(limits)


def test_the_mean_is_unknown_before_anything_was_accepted():
    run = Run(CALM)
    assert np.isnan(run(np.nan).measures["loss_mean"]) and float(run(4.0).measures["loss_mean"]) == 4
