"""Gated feed-forward network and RMSNorm: formulas, precision and names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import FFN, glu
from k3train.models.parts.ffn.names import names
from k3train.models.parts.norm.layer import RMSNorm, rms_norm


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_is_the_stated_formula_and_bounded(linear_beta):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 7, 5)).astype(np.float32) * 20
    got = glu(jnp.asarray(gate), jnp.asarray(up), ActivationConfig(linear_beta=linear_beta))
    linear = up if linear_beta is None else linear_beta * np.tanh(up / linear_beta)
    np.testing.assert_allclose(got, 4 * np.tanh(gate / 4) * sigmoid(gate) * linear, rtol=2e-5, atol=2e-5)
    if linear_beta is not None:
        assert np.max(np.abs(got)) <= 100


def test_swiglu_is_silu_times_up():
    rng = np.random.default_rng(1)
    gate, up = rng.normal(size=(2, 7, 5)).astype(np.float32)
    got = glu(jnp.asarray(gate), jnp.asarray(up), ActivationConfig(kind="swiglu"))
    np.testing.assert_allclose(got, gate * sigmoid(gate) * up, rtol=1e-5, atol=1e-6)


def test_glu_rounds_once_in_bfloat16():
    gate = jnp.asarray(np.linspace(-3, 3, 64), jnp.bfloat16)
    got = glu(gate, gate, ActivationConfig())
    exact = glu(gate.astype(jnp.float32), gate.astype(jnp.float32), ActivationConfig())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(exact.astype(jnp.bfloat16)))


def test_ffn_parameters_are_those_its_names_list():
    ffn = FFN(6, 4, ActivationConfig(), 0.02, rngs=nnx.Rngs(0))
    shapes = {path[0]: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(ffn, nnx.Param))}
    assert shapes == {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    assert set(names()) == set(shapes)
    assert ffn(jnp.ones((2, 3, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_rms_norm_is_computed_wide():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3, 16)).astype(np.float32)
    w = rng.normal(size=16).astype(np.float32)
    want = w * x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(w), 1e-5), want, rtol=1e-5)
    half = jnp.asarray(x, jnp.bfloat16)
    norm = RMSNorm(16, 1e-5, rngs=nnx.Rngs(0))
    want = rms_norm(half.astype(jnp.float32), jnp.ones(16), 1e-5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(norm(half)), np.asarray(want))
    assert jax.eval_shape(norm, half).dtype == jnp.bfloat16
