"""Newton-Schulz: equal to the formula in float64, batch by batch, and safe at its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.kernels.newton_schulz import reference
from k3train.kernels.newton_schulz.api import orthogonalize
from k3train.kernels.newton_schulz.specs import SHAPES, SINGULAR_VALUES, TOLERANCE


def formula(m: np.ndarray, steps: int = 5) -> np.ndarray:
    """k3-facts 9.1 for one matrix in float64."""
    if m.shape[0] > m.shape[1]:
        return formula(m.T, steps).T
    x = m.astype(np.float64) / np.linalg.norm(m.astype(np.float64))
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def draw(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_the_formula(shape, dtype):
    m = draw(shape)
    got = np.asarray(orthogonalize(jnp.asarray(m), 5, dtype))
    want = np.stack([formula(x) for x in m.reshape(-1, *shape[-2:])]).reshape(shape)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype])


def test_reference_equals_the_formula():
    m = draw((12, 7))
    np.testing.assert_allclose(reference.orthogonalize(jnp.asarray(m)), formula(m), rtol=0, atol=5e-5)


def test_singular_values_near_one():
    values = np.linalg.svd(np.asarray(orthogonalize(jnp.asarray(draw((3, 24, 64))), 5, "float32")), compute_uv=False)
    low, high = SINGULAR_VALUES
    assert low < values.min() and values.max() < high


def test_zero_matrix_gives_zeros_beside_others():
    m = draw((3, 8, 6))
    m[1] = 0
    got = np.asarray(orthogonalize(jnp.asarray(m), 5, "float32"))
    assert not got[1].any()
    np.testing.assert_allclose(got[2], formula(m[2]), rtol=0, atol=5e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter(scale):
    m = draw((8, 12))
    got = orthogonalize(jnp.asarray(m * np.float32(scale)), 5, "float32")
    np.testing.assert_allclose(got, formula(m), rtol=0, atol=1e-4)


def test_subnormal_matrix_is_finite():
    assert np.isfinite(np.asarray(orthogonalize(jnp.full((4, 4), 1e-41, jnp.float32), 5, "float32"))).all()


def test_non_finite_stays_visible():
    assert np.isnan(np.asarray(orthogonalize(jnp.full((4, 4), jnp.nan), 5, "float32"))).any()


def test_one_small_program_whatever_the_steps():
    text = [str(jax.make_jaxpr(lambda m, n=n: orthogonalize(m, n, "float32"))(jnp.ones((4, 8)))) for n in (2, 20)]
    assert text[0].count("dot_general") == text[1].count("dot_general") == 3
