"""Router-bias updates: the quantile form against exact quantiles, its effect on load, and its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.kernels.quantile_histogram.api import histogram, histogram_range
from k3train.optim.balance import quantile_bias, update_bias
from k3train.optim.config import BalanceConfig

N, E, K, BINS = 4096, 64, 4, 1000


def skewed(seed=0):
    """Scores [N, E] that favour some experts strongly."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((N, E)) + np.linspace(-2, 2, E)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def route(scores, bias):
    """Cut-off [N] and load [E] of top-k routing by biased scores."""
    biased = scores + bias
    order = np.argsort(-biased, axis=1, kind="stable")
    cutoff = np.take_along_axis(biased, order[:, K : K + 1], 1)[:, 0]
    return cutoff, np.bincount(order[:, :K].ravel(), minlength=E)


@jax.jit
def count(scores, cutoff, bias, valid):
    return histogram(scores, cutoff, bias, valid, BINS)


def counted(scores, bias, valid=None):
    cutoff, load = route(scores, bias)
    valid = np.ones(len(scores), bool) if valid is None else valid
    return np.asarray(count(scores, cutoff, bias, valid)), cutoff, load


def violation(load):
    return load.max() / load.mean() - 1


def test_violation_falls_tenfold_in_two_steps():
    scores, bias = skewed(), np.zeros(E, np.float32)
    start = violation(route(scores, bias)[1])
    for _ in range(2):
        counts, _, load = counted(scores, bias)
        bias = np.asarray(update_bias(jnp.asarray(bias), jnp.asarray(counts), jnp.asarray(load), BalanceConfig(), K))
    assert start > 2
    assert violation(route(scores, bias)[1]) <= start / 10


def test_within_a_bin_of_the_exact_quantile():
    scores = skewed(1)
    bias = np.random.default_rng(2).standard_normal(E).astype(np.float32) * 0.1
    counts, cutoff, _ = counted(scores, bias)
    needed = np.sort(cutoff[:, None] - scores, axis=0)  # [N, E]
    exact = needed[int(np.ceil(N * K / E)) - 1]
    width = (bias.max() - bias.min() + 2) / BINS
    got = np.asarray(quantile_bias(jnp.asarray(bias), jnp.asarray(counts), K))
    # Both centred; the centring of the exact one differs by less than a bin too.
    error = (got - got.mean()) - (exact - exact.mean())
    assert abs(got.mean()) < 1e-6
    assert np.abs(error).max() < width


def test_histogram_equals_numpy():
    scores, bias = skewed(3), np.linspace(-0.2, 0.2953, E).astype(np.float32)
    counts, cutoff, _ = counted(scores, bias)
    low, width = (np.asarray(x) for x in histogram_range(jnp.asarray(bias), BINS))
    assert low == pytest.approx(-1.2) and width == pytest.approx(2.4953 / BINS)
    edges = low + width * np.arange(BINS + 1)
    for expert in (0, 31, 63):
        want, _ = np.histogram(cutoff - scores[:, expert], edges)
        # Values on an edge may fall either way in float32.
        assert np.abs(np.cumsum(want) - np.cumsum(counts[expert])).max() <= 2


def test_padding_is_not_counted():
    scores, bias = skewed(4), np.zeros(E, np.float32)
    valid = np.random.default_rng(5).random(N) < 0.6
    counts, cutoff, _ = counted(scores, bias, valid)
    assert (counts.sum(1) == valid.sum()).all()
    only = np.asarray(histogram(*(jnp.asarray(x) for x in (scores[valid], cutoff[valid], bias)),
                                jnp.ones(valid.sum(), bool), BINS))  # fmt: skip
    np.testing.assert_array_equal(counts, only)


def test_all_tokens_to_one_expert():
    scores = np.full((N, E), 0.01, np.float32) + np.random.default_rng(6).random((N, E)).astype(np.float32) * 0.01
    scores[:, 7] = 0.999
    counts, _, load = counted(scores, np.zeros(E, np.float32))
    bias = np.asarray(update_bias(jnp.zeros(E), jnp.asarray(counts), jnp.asarray(load), BalanceConfig(), K))
    assert np.isfinite(bias).all()
    assert bias.argmin() == 7
    assert load[7] == N
    assert route(scores, bias)[1][7] < 0.2 * N  # its fair share is N K / E = N / 16


@pytest.mark.parametrize("kind", ["quantile", "sign", "none"])
def test_no_tokens_leaves_the_bias(kind):
    bias = jnp.linspace(-0.5, 0.7, E)
    empty = jnp.zeros((E, BINS), jnp.int32)
    new = update_bias(bias, empty, jnp.zeros(E, jnp.int32), BalanceConfig(kind=kind, ema=0.5), K)
    np.testing.assert_array_equal(new, bias)


def test_layers_are_independent_and_ema_mixes():
    counts = np.stack([counted(skewed(s), np.zeros(E, np.float32))[0] for s in (7, 8)])
    bias, load = jnp.zeros((2, E)), jnp.zeros((2, E), jnp.int32)
    both = update_bias(bias, jnp.asarray(counts), load, BalanceConfig(), K)
    one = update_bias(bias[1], jnp.asarray(counts[1]), load[1], BalanceConfig(), K)
    np.testing.assert_allclose(both[1], one, atol=1e-6)
    mixed = update_bias(bias, jnp.asarray(counts), load, BalanceConfig(ema=0.75), K)
    np.testing.assert_allclose(mixed, 0.25 * both, atol=1e-6)


def test_sign_form():
    load = jnp.asarray([8, 2, 5, 5], jnp.int32)
    new = update_bias(jnp.zeros(4), None, load, BalanceConfig(kind="sign", rate=0.01), 2)
    np.testing.assert_allclose(new, [-0.01, 0.01, 0, 0], atol=1e-8)
