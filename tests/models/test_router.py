"""Router: choice, weights, groups, cut-off, gradients and what rematerialisation keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.models.parts.router.config import RouterConfig
from k3train.models.parts.router.layer import route

TOKENS, HIDDEN, EXPERTS = 30, 8, 12


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    weight = rng.normal(size=(HIDDEN, EXPERTS)).astype(np.float32)
    bias = (rng.normal(size=EXPERTS) * 0.3).astype(np.float32)
    return x, weight, bias


def plain(x, weight, bias, cfg, top_k):
    """One token at a time, as the formulas read."""
    ids, weights, cutoffs = [], [], []
    for token in x.astype(np.float64):
        logits = token @ weight
        scores = 1 / (1 + np.exp(-logits)) if cfg.score == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        biased = scores + bias
        groups = np.arange(EXPERTS) // (EXPERTS // cfg.groups)
        ranking = sorted(range(cfg.groups), key=lambda g: -np.sort(biased[groups == g])[-2:].sum())
        able = [e for e in range(EXPERTS) if groups[e] in ranking[: cfg.groups_used]]
        order = sorted(able, key=lambda e: -biased[e])
        chosen = scores[order[:top_k]]
        ids.append(order[:top_k])
        weights.append(cfg.scale * (chosen / chosen.sum() if cfg.renormalize and top_k > 1 else chosen))
        cutoffs.append(biased[order[min(top_k, len(order) - 1)]])
    return np.array(ids), np.array(weights), np.array(cutoffs)


@pytest.mark.parametrize(
    ("cfg", "top_k"),
    [
        (RouterConfig(scale=2.5), 3),
        (RouterConfig(renormalize=False), 2),
        (RouterConfig(scale=1.7), 1),
        (RouterConfig(score="softmax"), 3),
        (RouterConfig(groups=4, groups_used=2), 4),
        (RouterConfig(groups=4, groups_used=1), 3),
        (RouterConfig(), EXPERTS),
    ],
)
def test_route_follows_the_formulas(cfg, top_k):
    x, weight, bias = inputs()
    got = route(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias), cfg, top_k)
    ids, weights, cutoff = plain(x, weight, bias, cfg, top_k)
    np.testing.assert_array_equal(got.ids, ids)
    np.testing.assert_allclose(got.weights, weights, rtol=1e-5)
    np.testing.assert_allclose(got.cutoff, cutoff, rtol=1e-5, atol=1e-6)


def test_ties_take_the_lower_id():
    got = route(jnp.ones((3, HIDDEN)), jnp.zeros((HIDDEN, EXPERTS)), jnp.zeros(EXPERTS), RouterConfig(), 3)
    np.testing.assert_array_equal(got.ids, np.tile([0, 1, 2], (3, 1)))


def test_gradient_reaches_scores_only():
    x, weight, bias = (jnp.asarray(a) for a in inputs())
    cfg = RouterConfig(renormalize=False)
    dw = jnp.asarray(np.random.default_rng(3).normal(size=(TOKENS, 3)), jnp.float32)

    def loss(x, weight, bias):
        return jnp.sum(route(x, weight, bias, cfg, 3).weights * dw)

    dx, dweight, dbias = jax.grad(loss, argnums=(0, 1, 2))(x, weight, bias)
    assert not np.any(np.asarray(dbias))
    ids = np.asarray(route(x, weight, bias, cfg, 3).ids)
    s = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(weight)))
    dscores = np.zeros((TOKENS, EXPERTS))
    np.put_along_axis(dscores, ids, np.asarray(dw), axis=1)
    dlogits = dscores * s * (1 - s)
    np.testing.assert_allclose(dx, dlogits @ np.asarray(weight).T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(dweight, np.asarray(x).T @ dlogits, rtol=1e-4, atol=1e-6)


def test_scores_are_wide_under_bfloat16():
    x, weight, bias = (jnp.asarray(a) for a in inputs())
    half = route(x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), bias, RouterConfig(), 3)
    exact = route(*(a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, weight)), bias, RouterConfig(), 3)
    assert half.scores.dtype == half.weights.dtype == half.cutoff.dtype == jnp.float32
    np.testing.assert_allclose(half.scores, exact.scores, rtol=1e-6)
    mixed = route(x.astype(jnp.bfloat16), weight, bias, RouterConfig(), 3)
    assert mixed.scores.dtype == jnp.float32
    grad = jax.grad(lambda w: jnp.sum(route(x.astype(jnp.bfloat16), w, bias, RouterConfig(), 3).weights ** 2))
    assert grad(weight.astype(jnp.bfloat16)).dtype == jnp.bfloat16
