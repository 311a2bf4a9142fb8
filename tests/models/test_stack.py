"""The layer stack: how it is cut, and that its hand-made backward pass is the plain one's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from k3train.kernels.config import KernelsConfig
from k3train.models.block import Depth
from k3train.models.config import LayerKind, ModelConfig
from k3train.models.segments import segments
from k3train.models.stack import Stack, write_row

LAYERS = 5
K, KD, M = LayerKind("kda", "moe"), LayerKind("kda", "dense"), LayerKind("mla", "moe")


def test_segments_of_k3_compile_nine_layers():
    kinds = [KD, K, K, M] + [K, K, K, M] * 22 + [M]
    assert sum(len(seg.kinds) for seg in segments(kinds)) == 9
    numbers = [seg.layer(r, j) for seg in segments(kinds) for r in range(seg.repeats) for j in range(len(seg.kinds))]
    assert numbers == list(range(93))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13, 27])
def test_segments_keep_every_layer_in_order(count: int):
    rng = np.random.default_rng(count)
    kinds = [(K, KD, M)[i] for i in rng.integers(0, 3, count)]
    rebuilt = [kind for seg in segments(kinds) for _ in range(seg.repeats) for kind in seg.kinds]
    assert rebuilt == kinds


def _stack(residual: dict, remat: str) -> tuple[Stack, dict, dict, jax.Array, jax.Array]:
    layers = {"count": LAYERS, "kda": [5], "mla": [1, 2, 3, 4]}  # a prefix, a period three times, a tail
    cfg = ModelConfig.model_validate({**tiny.MODEL, "layers": layers, "attn_residual": residual})
    kernels = KernelsConfig(kda="recurrent", attention="reference", grouped_matmul="reference")
    stack = Stack(cfg, kernels, cfg.layers.kinds(), cfg.attn_residual.block_starts(LAYERS), remat=remat, balance_bins=8)
    rng = np.random.default_rng(0)
    params, buffers = jax.eval_shape(stack.init, jax.random.key(0))
    params = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) * 0.2, jnp.float32), params)
    buffers = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), buffers)
    x = jnp.asarray(rng.normal(size=(2, 8, 32)), jnp.float32)
    return stack, params, buffers, x, jnp.asarray([[1] * 5 + [2] * 3, [1] * 8], jnp.int32)


def _plain(stack: Stack, params, buffers, x, segment_ids):
    """The same layers one after the other, differentiated by JAX alone."""
    bank = jnp.zeros((stack.rows, *x.shape), x.dtype) if stack.banked else None
    for i in range(LAYERS):
        layer, where = stack.layer(i, params, buffers)
        middle, end, _ = layer(Depth(x, bank, where.filled), where.starts, segment_ids)
        if bank is not None:
            bank = write_row(bank, where.filled, x, where.starts[0])
            bank = write_row(bank, where.filled + where.starts[0].astype(jnp.int32), middle, where.starts[1])
        x = end
    return x, bank


@pytest.mark.parametrize(
    ("residual", "remat"),
    [
        ({"kind": "block", "block_size": 2}, "full"),
        ({"kind": "block", "block_size": 3}, "none"),
        ({"kind": "full"}, "full"),
        ({"kind": "none"}, "full"),
    ],
    ids=str,
)
def test_backward_equals_plain_autodiff(residual: dict, remat: str):
    stack, params, buffers, x, segment_ids = _stack(residual, remat)

    def loss(run):
        def of(params, x):
            end, bank = run(params, x)
            return jnp.sum(end**2) + (0.0 if bank is None else jnp.sum(bank**3))

        return jax.jit(jax.value_and_grad(of, argnums=(0, 1)))

    got = loss(lambda p, x: stack(p, buffers, x, segment_ids)[:2])(params, x)
    want = loss(lambda p, x: _plain(stack, p, buffers, x, segment_ids))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * float(jnp.abs(b).max() + 1e-3))


@pytest.mark.parametrize("remat", ["full", "none"])
def test_no_repeat_saves_the_bank(remat: str):
    stack, params, buffers, x, segment_ids = _stack({"kind": "block", "block_size": 2}, remat)
    grad = jax.grad(lambda p: jnp.sum(stack(p, buffers, x, segment_ids)[0]))
    repeats = next(seg.repeats for seg in stack.segments if seg.name == "period")
    assert repeats > 1
    assert f"[{repeats},{stack.rows},2,8,32]" not in str(jax.make_jaxpr(grad)(params))


def test_statistics_come_in_layer_order():
    stack, params, buffers, x, segment_ids = _stack({"kind": "block", "block_size": 2}, "full")

    def one_by_one(params, x):
        single = []
        bank, prefix = jnp.zeros((stack.rows, *x.shape)), x
        for i in range(LAYERS):
            layer, where = stack.layer(i, params, buffers)
            _, end, seen = layer(Depth(prefix, bank, where.filled), where.starts, segment_ids)
            bank, prefix = write_row(bank, where.filled, prefix, where.starts[0]), end
            single += [seen["load"]] if "load" in seen else []
        return jnp.stack(single)

    stats = jax.jit(lambda params, x: stack(params, buffers, x, segment_ids)[-1])(params, x)
    assert stats["max_logit"].shape == (4, 2) and stats["load"].shape == (4, 8) and stats["decay_mean"].shape == (1,)
    np.testing.assert_array_equal(stats["load"].sum(1), np.full(4, 2 * 8 * 2))
    np.testing.assert_array_equal(stats["load"], jax.jit(one_by_one)(params, x))
    index = stack.by_layer(lambda kind: kind.ffn == "moe")
    assert sorted(n for seg in index.values() for rows in seg.values() for n in rows) == list(range(4))
