"""Gated MLA: packed rows, causality, and decoding from the latent cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.models.parts.mla.config import MLAConfig
from k3train.models.parts.mla.layer import MLA
from k3train.models.parts.mla.names import names

HIDDEN = 16
SIZES = {"num_heads": 2, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_shared_head_dim": 4, "v_head_dim": 5}
K3 = MLAConfig(**SIZES, q_lora_rank=12)
KIMI_LINEAR = MLAConfig(**SIZES, output_gate=False)


def build(cfg, block=4):
    """An MLA layer with NumPy-drawn weights large enough that attention is far from uniform."""
    kernels = KernelsConfig(attention_block=block)
    graph, state = nnx.split(nnx.eval_shape(lambda: MLA(cfg, HIDDEN, 0.02, kernels, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) * 0.5, jnp.float32), state)
    return nnx.merge(graph, state), graph, state


def hidden_states(rows, tokens, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, tokens, HIDDEN)), jnp.float32)


def value_and_grads(graph, state, x, dy, segment_ids=None):
    def loss(state, x):
        y, stats = nnx.merge(graph, state)(x, segment_ids)
        return jnp.sum(y * dy), (y, stats["max_logit"])

    (_, (y, top)), (dw, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    return y, top, dx, dw


def test_packed_equals_separate_documents():
    _, graph, state = build(K3)
    lengths = [1, 4, 6]
    x, dy = hidden_states(1, sum(lengths)), hidden_states(1, sum(lengths), seed=2)
    ids = jnp.asarray(np.repeat([1, 2, 3], lengths)[None], jnp.int32)
    y, top, dx, dw = value_and_grads(graph, state, x, dy, ids)
    start, parts = 0, []
    for length in lengths:
        part = slice(start, start + length)
        parts.append(value_and_grads(graph, state, x[:, part], dy[:, part]))
        start += length
    np.testing.assert_allclose(y, jnp.concatenate([p[0] for p in parts], axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(top, np.max([p[1] for p in parts], axis=0), rtol=1e-5)
    np.testing.assert_allclose(dx, jnp.concatenate([p[2] for p in parts], axis=1), rtol=1e-4, atol=1e-4)
    total = jax.tree.map(lambda *grads: sum(grads), *[p[3] for p in parts])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), dw, total)


def test_later_tokens_leave_earlier_outputs_bit_equal():
    _, graph, state = build(K3)
    x = hidden_states(2, 19)
    ids = jnp.asarray([[1] * 7 + [2] * 12, [1] * 15 + [0] * 4], jnp.int32)
    run = jax.jit(lambda x: nnx.merge(graph, state)(x, ids)[0])
    before = np.asarray(run(x))
    for t in (18, 9, 4):
        after = np.asarray(run(x.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[0, t:] != before[0, t:])


@pytest.mark.parametrize("cfg", [K3, KIMI_LINEAR], ids=["k3", "kimi_linear"])
def test_extend_in_pieces_equals_the_full_forward(cfg):
    layer, graph, state = build(cfg)
    lengths = np.array([9, 6])
    x = hidden_states(2, 9)
    full = np.stack([np.pad(layer(x[i : i + 1, :n])[0][0], ((0, 9 - n), (0, 0))) for i, n in enumerate(lengths)])
    cache = layer.init_cache(2, 12, jnp.float32)
    extend = jax.jit(lambda x, valid, cache: nnx.merge(graph, state).extend(x, valid, cache))
    pieces = []
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9)):
        valid = jnp.asarray(np.arange(start, stop)[None] < lengths[:, None])
        y, cache = extend(x[:, start:stop], valid, cache)
        pieces.append(np.where(np.asarray(valid)[..., None], y, 0.0))
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), full, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cache.length, lengths)
    assert not np.any(np.asarray(cache.latent[1, 6:])), "an invalid token was written"


def test_output_stays_wide_until_after_the_gate():
    layer, _, _ = build(K3)
    x = hidden_states(1, 6).astype(jnp.bfloat16)
    jaxpr = jax.make_jaxpr(lambda x: layer(x)[0])(x)
    gates = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "logistic"]
    assert [str(gate.invars[0].aval.dtype) for gate in gates] == ["float32"]
    product = next(eqn for eqn in jaxpr.jaxpr.eqns if gates[0].outvars[0] in eqn.invars)
    assert {str(v.aval.dtype) for v in product.invars} == {"float32"}


@pytest.mark.parametrize("cfg", [K3, KIMI_LINEAR], ids=["k3", "kimi_linear"])
def test_parameters_are_those_the_config_counts_and_names_list(cfg):
    shapes = nnx.eval_shape(lambda: MLA(cfg, HIDDEN, 0.02, KernelsConfig(), rngs=nnx.Rngs(0)))
    found = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(shapes, nnx.Param))}
    assert sum(leaf.size for leaf in found.values()) == cfg.parameters(HIDDEN)
    assert set(names(cfg)) == set(found)
    assert all(len(leaf.get_metadata("spec").axes) == leaf.ndim for leaf in found.values())
    per_head = {name for name, leaf in found.items() if leaf.get_metadata("spec").heads == cfg.num_heads}
    assert per_head == ({"q_b_proj", "kv_b_proj"} if cfg.q_lora_rank else {"q_proj", "kv_b_proj"})
