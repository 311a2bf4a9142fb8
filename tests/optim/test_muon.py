"""Per-Head Muon against the formula in NumPy float64."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.optim.config import MuonConfig
from k3train.optim.heads import join_heads, split_heads
from k3train.optim.muon import muon

CFG = MuonConfig(dtype="float32")
LR = 0.02


def formula(m):
    """Newton-Schulz of one matrix (k3-facts 9.1)."""
    if m.shape[0] > m.shape[1]:
        return formula(m.T).T
    x = m / np.linalg.norm(m)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def formula_step(w, g, m, heads, decay, nesterov=True):
    """One update of an array [..., n, H*d], block by block."""
    m = 0.95 * m + g
    direction = g + 0.95 * m if nesterov else m
    out = np.empty_like(w)
    width = w.shape[-1] // heads
    for index in np.ndindex(w.shape[:-2]):
        for head in range(heads):
            cut = (*index, slice(None), slice(head * width, (head + 1) * width))
            out[cut] = 0.2 * np.sqrt(max(w.shape[-2], width)) * formula(direction[cut])
    return w - LR * (out + decay * w), m


@dataclass
class Case:
    shape: tuple[int, ...]
    heads: int = 1
    decay: float = 0.1


CASES = {
    ("wide",): Case((6, 20)),
    ("tall",): Case((20, 6), decay=0.0),
    ("narrow",): Case((20, 6)),
    ("heads_tall",): Case((24, 4 * 8), heads=4),
    ("heads_wide",): Case((6, 3 * 10), heads=3),
    ("stack", "heads"): Case((2, 24, 2 * 8), heads=2),
    ("stack", "experts"): Case((2, 3, 6, 20)),
}


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_numpy(nesterov):
    rng = np.random.default_rng(1)
    params = {path: rng.standard_normal(case.shape) for path, case in CASES.items()}
    momentum = {path: np.zeros(case.shape) for path, case in CASES.items()}
    heads = {path: case.heads for path, case in CASES.items()}
    decay = {path: case.decay for path, case in CASES.items()}
    cfg = CFG.model_copy(update={"nesterov": nesterov})
    ours = {path: jnp.asarray(w, jnp.float32) for path, w in params.items()}
    state = {path: jnp.zeros(case.shape) for path, case in CASES.items()}
    step = jax.jit(lambda grads, state, params, lr: muon(grads, state, params, heads, decay, cfg, lr))
    for _ in range(2):
        grads = {path: rng.standard_normal(case.shape) for path, case in CASES.items()}
        single = {path: jnp.asarray(g, jnp.float32) for path, g in grads.items()}
        changes, state = step(single, state, ours, jnp.float32(LR))
        ours = {path: w + changes[path] for path, w in ours.items()}
        for path, case in CASES.items():
            params[path], momentum[path] = formula_step(
                params[path], grads[path], momentum[path], case.heads, case.decay, nesterov
            )
    for path in CASES:
        np.testing.assert_allclose(ours[path], params[path], rtol=0, atol=5e-6, err_msg=str(path))
        np.testing.assert_allclose(state[path], momentum[path], rtol=0, atol=2e-6, err_msg=str(path))


def test_update_has_singular_values_near_one():
    grad = jnp.asarray(np.random.default_rng(2).standard_normal((32, 4 * 16)), jnp.float32)
    path, zero = ("w",), jnp.zeros((32, 64))
    changes, _ = muon({path: grad}, {path: zero}, {path: zero}, {path: 4}, {path: 0.0}, CFG, jnp.float32(1.0))
    blocks = np.asarray(split_heads(changes[path], 4)) / (0.2 * np.sqrt(32))
    values = np.linalg.svd(blocks, compute_uv=False)
    assert values.shape == (4, 16)
    assert values.min() > 0.6 and values.max() < 1.25


def test_heads_split_and_join():
    x = jnp.arange(2 * 3 * 8.0).reshape(2, 3, 8)
    parts = split_heads(x, 4)
    assert parts.shape == (2, 4, 3, 2)
    np.testing.assert_array_equal(parts[1, 2], x[1, :, 4:6])
    np.testing.assert_array_equal(join_heads(parts, 4), x)


def test_large_arrays_are_not_joined(monkeypatch):
    rng = np.random.default_rng(3)
    grads = {(name,): jnp.asarray(rng.standard_normal((4, 6)), jnp.float32) for name in "abc"}
    zeros = {path: jnp.zeros((4, 6)) for path in grads}
    args = (zeros, zeros, dict.fromkeys(grads, 1), dict.fromkeys(grads, 0.0), CFG, jnp.float32(1.0))
    joined, _ = muon(grads, *args)
    monkeypatch.setattr("k3train.optim.muon.STACK_LIMIT", 50)
    apart, _ = muon(grads, *args)
    for path in grads:
        np.testing.assert_allclose(joined[path], apart[path], rtol=0, atol=1e-6)
