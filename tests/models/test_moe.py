"""Mixture of experts: equals a dense oracle at any skew, drops nothing, keeps causality and its routing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import equations

from k3train.kernels.config import KernelsConfig
from k3train.models.param import Buffer
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import glu
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.moe.layer import MoE
from k3train.models.parts.moe.names import names
from k3train.models.parts.norm.layer import rms_norm
from k3train.models.parts.router.config import RouterConfig
from k3train.models.parts.router.layer import route

HIDDEN, BINS = 12, 40
ACTIVATION = ActivationConfig()
LATENT = MoEConfig(num_experts=6, top_k=2, intermediate_size=7, num_shared=2, latent_size=8)
PLAIN = MoEConfig(num_experts=6, top_k=3, intermediate_size=7, router=RouterConfig(groups=3, groups_used=2))


def build(cfg, bias=None, kernels=KernelsConfig()):
    """Graph, parameters and buffers of a layer with NumPy-drawn weights of size one."""
    make = lambda: MoE(cfg, HIDDEN, ACTIVATION, 1e-5, 0.02, kernels, BINS, rngs=nnx.Rngs(0))  # noqa: E731
    graph, params, buffers = nnx.split(nnx.eval_shape(make), nnx.Param, Buffer)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5, jnp.float32), params)
    bias = jnp.asarray(rng.normal(size=cfg.num_experts) * 0.1 if bias is None else bias, jnp.float32)
    return graph, params, jax.tree.map(lambda _: bias, buffers)


def hidden_states(tokens, seed=1, rows=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, tokens, HIDDEN)), jnp.float32)


def dense(layer, x):
    """Every expert on every token, weights zero where not chosen."""
    cfg = layer.cfg
    flat = x.reshape(-1, HIDDEN)
    routing = route(flat, layer.router[...], layer.router_bias[...], cfg.router, cfg.top_k)
    rows = jnp.arange(flat.shape[0])[:, None]
    weights = jnp.zeros_like(routing.scores).at[rows, routing.ids].set(routing.weights)  # [N, E]
    z = flat @ layer.latent_down[...] if cfg.latent_size else flat
    inner = glu(jnp.einsum("nl,elm->enm", z, layer.w1[...]), jnp.einsum("nl,elm->enm", z, layer.w3[...]), ACTIVATION)
    y = jnp.einsum("enm,eml,ne->nl", inner, layer.w2[...], weights)
    if cfg.latent_size:
        y = rms_norm(y, layer.latent_norm.weight[...], 1e-5) @ layer.latent_up[...]
    return (y + layer.shared(flat) if cfg.num_shared else y).reshape(x.shape)


def value_and_grads(function, graph, params, buffers, x, dy):
    def loss(params, x):
        y = function(nnx.merge(graph, params, buffers), x)
        return jnp.sum(y * dy), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return y, *jax.tree.leaves(grads)


SKEWED = [0.0, 5.0, 0.0, 0.0, -5.0, 0.0]  # expert 1 takes every token, expert 4 none


@pytest.mark.parametrize(
    ("cfg", "tokens", "bias"),
    [
        (LATENT, 21, None),
        (LATENT, 40, SKEWED),
        (LATENT, 1, None),
        (LATENT.model_copy(update={"top_k": 6}), 9, None),
        (LATENT.model_copy(update={"top_k": 1, "num_shared": 0}), 30, SKEWED),
        (PLAIN, 21, None),
    ],
    ids=["latent", "skewed", "one_token", "all_experts", "all_to_one", "plain_groups"],
)
def test_blocked_equals_dense_forward_and_gradients(cfg, tokens, bias):
    graph, params, buffers = build(cfg, bias)
    x, dy = hidden_states(tokens), hidden_states(tokens, seed=2)
    got = value_and_grads(lambda layer, x: layer(x)[0], graph, params, buffers, x, dy)
    want = value_and_grads(dense, graph, params, buffers, x, dy)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-4, atol=2e-5 * max(1.0, float(np.max(np.abs(w)))))


def test_later_tokens_leave_earlier_outputs_bit_equal():
    graph, params, buffers = build(LATENT)
    x = hidden_states(70)
    run = jax.jit(lambda x: nnx.merge(graph, params, buffers)(x)[0])
    before = np.asarray(run(x))
    for t in (69, 33, 5):
        after = np.asarray(run(x.at[:, t].multiply(-1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        np.testing.assert_array_equal(after[:, t + 1 :], before[:, t + 1 :])
        assert np.any(after[:, t] != before[:, t])


def test_stats_count_valid_tokens_once():
    graph, params, buffers = build(LATENT)
    x = hidden_states(20, rows=2)
    ids = jnp.asarray([[1] * 12 + [0] * 8, [1] * 5 + [2] * 15], jnp.int32)
    layer = nnx.merge(graph, params, buffers)
    run = jax.jit(lambda x, ids: nnx.merge(graph, params, buffers)(x, ids))
    y, stats = run(x, ids)
    valid = np.asarray(ids).reshape(-1) != 0
    flat = np.asarray(x).reshape(-1, HIDDEN)[valid]
    router = jax.jit(lambda flat: route(flat, layer.router[...], layer.router_bias[...], LATENT.router, LATENT.top_k))
    routing = jax.tree.map(np.asarray, router(flat))
    np.testing.assert_array_equal(stats["load"], np.bincount(routing.ids.reshape(-1), minlength=6))
    share = routing.scores / routing.scores.sum(1, keepdims=True)
    np.testing.assert_allclose(stats["router_entropy"], -(share * np.log(share)).sum(1).mean(), rtol=1e-5)
    bias = np.asarray(layer.router_bias[...])
    needed = routing.cutoff[:, None] - routing.scores
    edges = np.linspace(bias.min() - 1, bias.max() + 1, BINS + 1)
    want = np.stack([np.histogram(needed[:, e], edges)[0] for e in range(6)])
    assert np.abs(np.asarray(stats["histogram"]) - want).sum() <= 2, "more than one value at a bin's edge"
    np.testing.assert_array_equal(np.asarray(stats["histogram"]).sum(1), valid.sum())
    other, _ = run(x.at[0, 12:].set(7.0), ids)
    np.testing.assert_array_equal(y[0, :12], other[0, :12])  # nor does padding touch other tokens


def test_stats_carry_no_gradient():
    graph, params, buffers = build(LATENT)
    x = hidden_states(9)
    grads = jax.jit(jax.grad(lambda p: nnx.merge(graph, p, buffers)(x)[1]["router_entropy"]))(params)
    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(grads))


def primitives(jaxpr):
    """Names of all primitives, in order, those of inner programs included."""
    return [equation.primitive.name for equation in equations(jaxpr)]


def test_rematerialisation_keeps_the_routing():
    graph, params, buffers = build(LATENT)
    x = hidden_states(9)

    def gradient(policy):
        run = jax.checkpoint(lambda p, x: nnx.merge(graph, p, buffers)(x)[0], policy=policy)
        return jax.grad(lambda p: jnp.sum(run(p, x) ** 2))

    def count(policy):
        names = primitives(jax.make_jaxpr(gradient(policy))(params).jaxpr)
        return {name: names.count(name) for name in ("top_k", "sort")}

    keep = jax.checkpoint_policies.save_only_these_names("routing")
    assert count(keep) == {"top_k": 1, "sort": 1}
    assert count(None) == {"top_k": 2, "sort": 2}


def test_bfloat16_holds_the_sum_over_experts_wide():
    graph, params, buffers = build(LATENT)
    x = hidden_states(64)
    run = jax.jit(lambda params, x: nnx.merge(graph, params, buffers)(x)[0])
    full = run(params, x)
    y = run(jax.tree.map(lambda a: a.astype(jnp.bfloat16), params), x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    error = np.asarray(y, np.float32) - np.asarray(full)
    # A token whose choice flips under rounding is another function: judge the median token.
    relative = np.linalg.norm(error[0], axis=1) / np.linalg.norm(np.asarray(full)[0], axis=1)
    assert np.median(relative) < 2e-2


@pytest.mark.parametrize("cfg", [LATENT, PLAIN], ids=["latent", "plain"])
def test_parameters_are_those_the_config_counts_and_names_list(cfg):
    _, params, _ = build(cfg)
    found = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(params)}
    assert sum(leaf.size for leaf in found.values()) == cfg.parameters(HIDDEN)
    assert set(names(cfg)) == set(found) | {"router_bias"}
    assert all(len(leaf.get_metadata("spec").axes) == leaf.ndim for leaf in found.values())


def test_four_devices_equal_one():
    graph, params, buffers = build(LATENT)
    x, dy = hidden_states(10, rows=4), hidden_states(10, seed=2, rows=4)
    ids = jnp.asarray(np.repeat([[1] * 7 + [2] * 3, [1] * 5 + [0] * 5], 2, axis=0), jnp.int32)
    keep = jax.checkpoint_policies.save_only_these_names("routing")

    def loss(params, x, ids):
        y, stats = jax.checkpoint(lambda p, x: nnx.merge(graph, p, buffers)(x, ids), policy=keep)(params, x)
        return jnp.sum(y * dy), (y, stats)

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    want = jax.jit(run)(params, x, ids)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("replica", "fsdp"))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("replica", "fsdp")))
    with jax.set_mesh(mesh):
        got = jax.jit(run, in_shardings=(None, rows, rows))(params, x, ids)
        names = primitives(jax.make_jaxpr(run)(params, x, ids).jaxpr)
    assert names.count("shard_map") >= 1 and names.count("top_k") == names.count("sort") == 1
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)
