"""QK-Clip: logits scale by gamma exactly, head by head, and nothing else moves."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3train.models.parts.mla.config import MLAConfig
from k3train.optim.qk_clip import qk_clip

R, H, D, RANK, KV = 2, 3, 10, 6, 5
NOPE, SHARED, V = 4, 2, 3


def setup(lora):
    cfg = MLAConfig(num_heads=H, q_lora_rank=RANK if lora else None, kv_lora_rank=KV, qk_nope_head_dim=NOPE,
                    qk_shared_head_dim=SHARED, v_head_dim=V)  # fmt: skip
    rng = np.random.default_rng(0)
    name, rows = ("q_b_proj", RANK) if lora else ("q_proj", D)
    shapes = {name: (R, rows, H * (NOPE + SHARED)), "kv_b_proj": (R, KV, H * (NOPE + V)),
              "kv_a_proj": (R, D, KV + SHARED), "o_proj": (R, H * V, D)}  # fmt: skip
    return cfg, name, {key: jnp.asarray(rng.standard_normal(shape), jnp.float32) for key, shape in shapes.items()}


def logits(params, name, inputs, latent, shared):
    """Scores [R, H] of one query against one key, and the value [R, H, V]."""
    q = np.einsum("d,rdc->rc", inputs, np.asarray(params[name])).reshape(R, H, NOPE + SHARED)
    kv = np.einsum("d,rdc->rc", latent, np.asarray(params["kv_b_proj"])).reshape(R, H, NOPE + V)
    return (q[..., :NOPE] * kv[..., :NOPE]).sum(-1) + (q[..., NOPE:] * shared).sum(-1), kv[..., NOPE:]


@pytest.mark.parametrize("lora", [True, False])
def test_logits_scale_by_gamma(lora):
    cfg, name, params = setup(lora)
    max_logit = jnp.asarray([[50.0, 200.0, 100.0], [400.0, -3.0, jnp.nan]])
    out = qk_clip(params, max_logit, 100.0, cfg)
    gamma = np.array([[1, 0.5, 1], [0.25, 1, 1]])
    rng = np.random.default_rng(1)
    args = rng.standard_normal(RANK if lora else D), rng.standard_normal(KV), rng.standard_normal(SHARED)
    before, value = logits(params, name, *args)
    after, new_value = logits(out.params, name, *args)
    np.testing.assert_allclose(after, gamma * before, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new_value, value)
    assert int(out.heads) == 2 and float(out.min_gamma) == 0.25
    for key in ("kv_a_proj", "o_proj"):
        assert out.params[key] is params[key]
    assert {key: x.dtype for key, x in out.params.items()} == {key: x.dtype for key, x in params.items()}


def test_both_sides_share_the_factor():
    cfg, name, params = setup(True)
    out = qk_clip(params, jnp.full((R, H), 400.0), 100.0, cfg)
    q = np.asarray(out.params[name] / params[name]).reshape(R, RANK, H, NOPE + SHARED)
    np.testing.assert_allclose(q[..., :NOPE], 0.5, rtol=1e-6)
    np.testing.assert_allclose(q[..., NOPE:], 0.25, rtol=1e-6)
    kv = np.asarray(out.params["kv_b_proj"] / params["kv_b_proj"]).reshape(R, KV, H, NOPE + V)
    np.testing.assert_allclose(kv[..., :NOPE], 0.5, rtol=1e-6)


def test_nothing_to_clip_changes_no_bit():
    cfg, _, params = setup(True)
    out = qk_clip(params, jnp.full((R, H), 100.0), 100.0, cfg)
    for key in params:
        np.testing.assert_array_equal(out.params[key], params[key])
    assert int(out.heads) == 0 and float(out.min_gamma) == 1


def test_without_a_stack_axis():
    cfg, name, params = setup(False)
    one = {key: x[0] for key, x in params.items()}
    out = qk_clip(one, jnp.asarray([50.0, 200.0, 400.0]), 100.0, cfg)
    both = qk_clip(params, jnp.asarray([[50.0, 200.0, 400.0]] * R), 100.0, cfg)
    np.testing.assert_array_equal(out.params[name], both.params[name][0])
