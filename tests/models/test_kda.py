"""The KDA mixer: packed = separate, causal, pieces = whole, its starting values, stats and published names."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.models.parts.kda.config import KDAConfig
from k3train.models.parts.kda.layer import KDA
from k3train.models.parts.kda.names import names

HIDDEN = 12
K3 = KDAConfig(num_heads=2, head_dim=8)
KIMI_LINEAR = KDAConfig(num_heads=2, head_dim=8, gate="softplus", output_gate="low_rank")
VARIANTS = pytest.mark.parametrize("cfg", [K3, KIMI_LINEAR], ids=["k3", "kimi_linear"])


@cache
def build(cfg):
    """The mixer's structure, and weights large enough for every path to show."""
    module = KDA(cfg, HIDDEN, 1e-5, 0.3, KernelsConfig(kda_chunk=16), rngs=nnx.Rngs(0))
    return nnx.split(module, nnx.Param)


@cache
def forward(cfg):
    return jax.jit(lambda weights, x, ids: nnx.merge(build(cfg)[0], weights)(x, ids))


@cache
def extend(cfg):
    return jax.jit(lambda weights, x, valid, cache: nnx.merge(build(cfg)[0], weights).extend(x, valid, cache))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_near(got, want, tolerance=2e-5):
    got, want = np.asarray(got), np.asarray(want)
    assert np.max(np.abs(got - want)) <= tolerance * np.max(np.abs(want))


@VARIANTS
def test_packed_equals_separate_forward_and_gradient(cfg):
    graph, weights = build(cfg)
    lengths, tokens = (1, 15, 16, 17), 52
    x, dy = draw(1, tokens, HIDDEN), draw(1, tokens, HIDDEN, seed=1)
    ids = np.pad(np.repeat(np.arange(1, 5), lengths), (0, tokens - 49))
    bounds = np.cumsum((0, *lengths))

    def split(a):
        parts = [a[0, lo:hi] for lo, hi in pairwise(bounds)]
        return jnp.stack([jnp.pad(p, ((0, tokens - len(p)), (0, 0))) for p in parts])

    def loss(weights, x, dy, ids):
        y, _ = nnx.merge(graph, weights)(x, ids)
        return jnp.sum(jnp.where((ids > 0)[..., None], y * dy, 0)), y

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    rows = lambda a: jnp.pad(a, ((0, 3),) + ((0, 0),) * (a.ndim - 1))  # noqa: E731, one compiled shape for both
    (dw, dx), y = grad(weights, rows(x), rows(dy), rows(jnp.asarray(ids[None], jnp.int32)))
    front = jnp.asarray(np.arange(tokens)[None] < np.asarray(lengths)[:, None], jnp.int32)
    (dw_apart, dx_apart), y_apart = grad(weights, split(x), split(dy), front)
    join = lambda a: np.concatenate([a[n, :size] for n, size in enumerate(lengths)])  # noqa: E731
    assert_near(y[0, :49], join(y_apart))
    assert_near(dx[0, :49], join(dx_apart))
    jax.tree.map(assert_near, dw, dw_apart)
    assert not np.any(dx[0, 49:]) and not np.any(dx[1:])


@VARIANTS
def test_nothing_before_a_perturbed_token_changes(cfg):
    _, weights = build(cfg)
    x, ids = draw(1, 40, HIDDEN), jnp.asarray(np.repeat([1, 2], [23, 17])[None], jnp.int32)
    before, _ = forward(cfg)(weights, x, ids)
    for t in (1, 15, 16, 23, 39):
        after, _ = forward(cfg)(weights, x.at[:, t].add(1.0), ids)
        assert np.array_equal(before[:, :t], after[:, :t]), t
        assert not np.array_equal(before[:, t], after[:, t]), t


@VARIANTS
def test_pieces_equal_the_whole(cfg):
    graph, weights = build(cfg)
    x = draw(2, 12, HIDDEN)
    whole, _ = forward(cfg)(weights, x, None)
    cache = nnx.merge(graph, weights).init_cache(2, 12, jnp.float32)
    # The prompts are of 5 and 3 tokens; the second row runs two tokens behind from then on.
    valid = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
    garbage = jnp.where(valid[..., None], x[:, :5], 7.0)
    y, cache = extend(cfg)(weights, garbage, valid, cache)
    assert_near(y[0], whole[0, :5])
    assert_near(y[1, :3], whole[1, :3])
    for step in range(7):
        token = jnp.stack([x[0, 5 + step], x[1, 3 + step]])[:, None]
        y, cache = extend(cfg)(weights, token, jnp.ones((2, 1), bool), cache)
        assert_near(y[0, 0], whole[0, 5 + step])
        assert_near(y[1, 0], whole[1, 3 + step])
    _, same = extend(cfg)(weights, token, jnp.zeros((2, 1), bool), cache)
    assert np.array_equal(same.state, cache.state) and np.array_equal(same.taps, cache.taps)


def test_starting_values():
    rngs = nnx.Rngs(3)
    wide_cfg = KDAConfig(num_heads=16, head_dim=64, gate="softplus", output_gate="low_rank")
    module = KDA(wide_cfg, 8, 1e-5, 0.02, KernelsConfig(), rngs=rngs)
    steps = np.log1p(np.exp(np.asarray(module.dt_bias[...])))  # softplus
    assert 9e-4 < steps.min() < 2e-3 and 0.05 < steps.max() < 0.101
    rates = np.exp(np.asarray(module.a_log[...]))
    assert rates.min() >= 1 and 8 < rates.max() <= 16
    assert np.abs(module.q_conv[...]).max() <= 0.5
    assert not np.any(KDA(K3, 8, 1e-5, 0.02, KernelsConfig(), rngs=rngs).a_log[...])


@VARIANTS
def test_names_and_counts(cfg):
    shapes = nnx.to_pure_dict(build(cfg)[1])
    stored = names(cfg)
    assert set(stored) == set(shapes)
    assert sum(a.size for a in shapes.values()) == cfg.parameters(HIDDEN)
    for name, where in stored.items():
        array = np.asarray(shapes[name])
        assert np.array_equal(where.to_ours(where.to_stored(array), array.shape), array)
    assert stored["a_log"].to_stored(np.ones(2)).shape == ((1, 1, 2, 1) if cfg is KIMI_LINEAR else (2,))


def test_published_a_log_is_padded():
    padded = K3.model_copy(update={"a_log_stored_multiple": 128})
    assert names(padded)["a_log"].to_stored(np.ones(2)).shape == (128,)


def test_stats_count_valid_tokens_only():
    _, weights = build(K3)
    x = draw(1, 20, HIDDEN)
    ids = jnp.asarray(np.repeat([1, 0], [12, 8])[None], jnp.int32)
    _, stats = forward(K3)(weights, x, ids)
    _, other = forward(K3)(weights, x.at[:, 12:].set(50.0), ids)
    assert set(stats) == {"decay_mean", "decay_min", "beta_mean", "state_rms"}
    for name, value in stats.items():
        assert value.dtype == jnp.float32 and value.shape == ()
        assert np.array_equal(value, other[name])
    assert np.exp(-5) <= stats["decay_min"] <= stats["decay_mean"] <= 1
    assert 0 < stats["beta_mean"] < 1


def test_bf16_keeps_its_dtype_and_the_state_wide():
    graph, weights = build(K3)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights)
    x = draw(1, 20, HIDDEN)
    y, _ = forward(K3)(half, x.astype(jnp.bfloat16), None)
    want, _ = forward(K3)(weights, x, None)
    assert y.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(y, np.float32) - want) < 0.05 * np.linalg.norm(want)
    cache = nnx.merge(graph, half).init_cache(1, 12, jnp.bfloat16)
    y, cache = extend(K3)(half, x[:, :1].astype(jnp.bfloat16), jnp.ones((1, 1), bool), cache)
    assert y.dtype == jnp.bfloat16 and cache.state.dtype == jnp.float32 and cache.taps.dtype == jnp.bfloat16


def test_bf16_gradients_are_finite_and_close():
    graph, weights = build(K3)
    x = draw(1, 20, HIDDEN)

    def loss(weights, x):
        return jnp.sum(jnp.square(nnx.merge(graph, weights)(x, None)[0].astype(jnp.float32)))

    grad = jax.jit(jax.grad(loss))
    want = grad(weights, x)
    got = grad(jax.tree.map(lambda a: a.astype(jnp.bfloat16), weights), x.astype(jnp.bfloat16))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(g, np.float32) - w) < 0.05 * np.linalg.norm(w)
