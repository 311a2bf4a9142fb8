"""The convolution against loops in NumPy, packed rows against separate ones, taps handed on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.kernels.causal_conv.api import causal_conv, next_taps

ROWS, TOKENS, CHANNELS, TAPS = 2, 24, 6, 4
run = jax.jit(causal_conv, static_argnames="activation")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def loops(x, w, ids, taps, activation):
    x, w = x.astype(np.float64), w.astype(np.float64)
    y = np.zeros(x.shape)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for d in range(len(w)):
                s = t - d
                if s >= 0 and ids[b, s] == ids[b, t]:
                    y[b, t] += w[len(w) - 1 - d] * x[b, s]
                elif s < 0 and taps is not None and ids[b, t] == ids[b, 0]:
                    y[b, t] += w[len(w) - 1 - d] * taps[b, s]
    return y / (1 + np.exp(-y)) if activation else y


@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("with_taps", [True, False])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_against_loops(size, with_taps, activation):
    x, w = draw(ROWS, TOKENS, CHANNELS), draw(size, CHANNELS, seed=1)
    ids = np.repeat([[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]], [2, 1, 3, 8, 10], axis=1)
    taps = draw(ROWS, size - 1, CHANNELS, seed=2) if with_taps else None
    got = run(x, w, segment_ids=jnp.asarray(ids), taps=taps, activation=activation)
    np.testing.assert_allclose(got, loops(x, w, ids, taps, activation), atol=1e-5)
    whole = run(x, w, taps=taps, activation=activation)
    np.testing.assert_allclose(whole, loops(x, w, np.ones_like(ids), taps, activation), atol=1e-5)


def test_packed_equals_separate_forward_and_gradient():
    lengths = (1, 2, 3, 4, 14)
    x, w, do = draw(1, TOKENS, CHANNELS), draw(TAPS, CHANNELS, seed=1), draw(1, TOKENS, CHANNELS, seed=2)
    ids = jnp.asarray(np.repeat(np.arange(1, 6), lengths)[None])

    def loss(x, w, do, ids):
        y = causal_conv(x, w, segment_ids=ids)
        return jnp.sum(y * do), y

    grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (dx, dw), y = grad(x, w, do, ids)
    start, dw_sum = 0, 0
    for length in lengths:
        part = slice(start, start + length)
        (dx_part, dw_part), y_part = grad(x[:, part], w, do[:, part], None)
        np.testing.assert_allclose(y[:, part], y_part, atol=1e-6)
        np.testing.assert_allclose(dx[:, part], dx_part, atol=1e-6)
        start, dw_sum = start + length, dw_sum + dw_part
    np.testing.assert_allclose(dw, dw_sum, atol=1e-5)


def test_nothing_before_a_perturbed_token_changes():
    x, w = draw(ROWS, TOKENS, CHANNELS), draw(TAPS, CHANNELS, seed=1)
    before = np.asarray(run(x, w))
    for t in (0, 5, 23):
        changed = x.copy()
        changed[:, t] += 1
        after = np.asarray(run(changed, w))
        assert np.array_equal(before[:, :t], after[:, :t])
        assert not np.array_equal(before[:, t], after[:, t])


def test_pieces_equal_the_whole():
    x, w = draw(ROWS, TOKENS, CHANNELS), draw(TAPS, CHANNELS, seed=1)
    whole = np.asarray(run(x, w))
    taps, start, pieces = jnp.zeros((ROWS, TAPS - 1, CHANNELS)), 0, []
    for length in (5, 1, 1, 2, 15):
        part = x[:, start : start + length]
        padded = np.pad(part, ((0, 0), (0, 15 - length), (0, 0)), constant_values=9)  # what follows the end is ignored
        pieces.append(run(padded, w, taps=taps)[:, :length])
        taps = next_taps(padded, taps, jnp.full(ROWS, length, jnp.int32))
        start += length
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-6)


def test_next_taps_of_rows_of_unequal_length():
    x, taps = draw(3, 5, CHANNELS), draw(3, TAPS - 1, CHANNELS, seed=3)
    got = next_taps(x, taps, jnp.asarray([0, 2, 5], jnp.int32))
    want = [taps[0], np.concatenate([taps[1, 2:], x[1, :2]]), x[2, 2:]]
    assert np.array_equal(got, np.stack(want))


def test_bf16_sums_are_wide():
    x = jnp.asarray(draw(ROWS, TOKENS, CHANNELS), jnp.bfloat16)
    w = draw(TAPS, CHANNELS, seed=1)
    y = run(x, w)
    assert y.dtype == jnp.bfloat16
    assert np.array_equal(y, run(x.astype(jnp.float32), w).astype(jnp.bfloat16))
