import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.kernels.embedding.api import ONE_HOT_VOCABULARY, lookup


@pytest.mark.parametrize("vocab", [7, ONE_HOT_VOCABULARY + 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lookup_and_gradient_equal_indexing(vocab: int, dtype: str):
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=(vocab, 5)), dtype)
    tokens = jnp.asarray(rng.integers(0, vocab, (3, 40)), jnp.int32)
    weight = jnp.asarray(rng.normal(size=(3, 40, 5)), dtype)
    np.testing.assert_array_equal(lookup(table, tokens), table[tokens])
    got = jax.grad(lambda t: jnp.sum((lookup(t, tokens) * weight).astype(jnp.float32)))(table)
    want = np.zeros((vocab, 5))
    np.add.at(want, np.asarray(tokens), np.asarray(weight, np.float64))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2 if dtype == "bfloat16" else 1e-5, atol=1e-2)
