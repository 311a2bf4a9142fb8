"""Grouped matmul and its permutation: blocked equals brute force, and every assignment arrives at any skew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.kernels.grouped_matmul import blocked
from k3train.kernels.grouped_matmul.api import gradients, grouped_matmul
from k3train.kernels.grouped_matmul.permute import block_rows, combine, dispatch, plan
from k3train.kernels.grouped_matmul.specs import BFLOAT16, BLOCKS, SKEWS, SMALL, TOLERANCE, choices

CASES = [(skew, shape) for skew in SKEWS for shape in SMALL]
EXPERTS, WIDTH, OUT = SMALL[0].experts, SMALL[0].width, SMALL[0].out


@pytest.mark.parametrize(("skew", "shape"), CASES)
def test_plan_puts_every_assignment_into_a_block_of_its_expert(skew, shape):
    ids, block = choices(skew, shape), shape.block
    slot, source, block_expert = (np.asarray(x) for x in plan(jnp.asarray(ids), EXPERTS, block))
    assert len(np.unique(slot)) == ids.size, "two assignments share a row"
    np.testing.assert_array_equal(source[slot.reshape(-1)], np.arange(ids.size))
    np.testing.assert_array_equal(block_expert[slot // block], ids)
    assert np.sum(source < ids.size) == ids.size
    assert np.all(np.diff(block_expert) >= 0)
    assert len(source) == len(block_expert) * block <= ids.size + EXPERTS * (block - 1)


def test_dispatch_and_combine_have_the_gradients_of_indexing():
    rng = np.random.default_rng(1)
    ids = jnp.asarray(choices("even", SMALL[0]._replace(tokens=11, top_k=3)))
    where = plan(ids, EXPERTS, 4)
    x = jnp.asarray(rng.normal(size=(11, WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.random((11, 3)), jnp.float32)
    d_rows = jnp.asarray(rng.normal(size=(len(where.source), WIDTH)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(11, WIDTH)), jnp.float32)
    live = (where.source < ids.size)[:, None]
    token = jnp.minimum(where.source, ids.size - 1) // 3

    def plain_dispatch(x):
        return jnp.where(live, x[token], 0.0)

    def plain_combine(rows, weights):
        return jnp.einsum("nkd,nk->nd", rows[where.slot], weights)

    rows = dispatch(x, where)
    np.testing.assert_array_equal(rows, plain_dispatch(x))
    got = jax.grad(lambda x: jnp.sum(dispatch(x, where) * d_rows))(x)
    np.testing.assert_allclose(
        got, jax.grad(lambda x: jnp.sum(plain_dispatch(x) * d_rows))(x), rtol=TOLERANCE, atol=TOLERANCE / 10
    )
    np.testing.assert_allclose(
        combine(rows, weights, where), plain_combine(rows, weights), rtol=TOLERANCE, atol=TOLERANCE / 10
    )
    got = jax.grad(lambda r, w: jnp.sum(combine(r, w, where) * dy), argnums=(0, 1))(rows, weights)
    want = jax.grad(lambda r, w: jnp.sum(plain_combine(r, w) * dy), argnums=(0, 1))(rows, weights)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=TOLERANCE, atol=TOLERANCE / 10)


@pytest.mark.parametrize("chunk_bytes", [2**20, 3 * WIDTH * OUT * 4])
@pytest.mark.parametrize("block_expert", BLOCKS, ids=str)
def test_blocked_equals_reference(block_expert, chunk_bytes, monkeypatch):
    monkeypatch.setattr(blocked, "CHUNK_BYTES", chunk_bytes)
    rng = np.random.default_rng(2)
    rows = jnp.asarray(rng.normal(size=(len(block_expert) * 4, WIDTH)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(EXPERTS, WIDTH, OUT)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(len(rows), OUT)), jnp.float32)
    expert = jnp.asarray(block_expert, jnp.int32)

    def run(implementation):
        def loss(rows, weights):
            y = grouped_matmul(rows, weights, expert, implementation=implementation)
            return jnp.sum(y * dy), y

        (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(rows, weights)
        return y, *grads

    for got, want in zip(run("blocked"), run("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def test_bfloat16_sums_are_wide():
    rng = np.random.default_rng(3)
    rows = jnp.asarray(rng.normal(size=(512, 64)), jnp.bfloat16)
    weights = jnp.asarray(rng.normal(size=(2, 64, 16)), jnp.bfloat16)
    dy = jnp.asarray(rng.normal(size=(512, 16)), jnp.bfloat16)
    expert = jnp.asarray([0] * 7 + [1], jnp.int32)

    def grads(implementation, dtype):
        def loss(rows, weights):
            y = grouped_matmul(rows, weights, expert, implementation=implementation)
            return jnp.sum(y.astype(jnp.float32) * dy.astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(rows.astype(dtype), weights.astype(dtype))

    for got, want in zip(grads("blocked", jnp.bfloat16), grads("reference", jnp.float32), strict=True):
        assert got.dtype == jnp.bfloat16
        error = np.linalg.norm(np.asarray(got, np.float32) - np.asarray(want))
        assert error <= BFLOAT16 * np.linalg.norm(np.asarray(want))


def test_gradients_by_themselves_leave_the_weights_sum_unrounded():
    rng = np.random.default_rng(4)
    rows, dy = (jnp.asarray(rng.normal(size=(64, width)), jnp.bfloat16) for width in (8, 4))
    weights, expert = jnp.asarray(rng.normal(size=(3, 8, 4)), jnp.bfloat16), jnp.asarray([0, 0, 2, 2], jnp.int32)
    (d_rows, d_weights), (want_rows, want) = (gradients(rows, weights, expert, dy, implementation=form)
                                              for form in ("blocked", "reference"))  # fmt: skip
    assert d_weights.dtype == want.dtype == jnp.float32 and d_rows.dtype == want_rows.dtype == jnp.bfloat16
    np.testing.assert_allclose(d_weights, want, rtol=1e-5, atol=1e-5)
    assert np.any(d_weights != d_weights.astype(jnp.bfloat16).astype(jnp.float32))
    _, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, expert), rows, weights)
    for got, wanted in zip(pull(dy), (d_rows, d_weights.astype(jnp.bfloat16)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_block_rows_follow_the_mean_group():
    assert block_rows(2048, 4, 16, 128) == 64
    assert block_rows(32768, 8, 64, 512) == 512
    assert block_rows(32768, 8, 64, 128) == 128
    assert block_rows(1, 4, 16, 128) == 8
    assert block_rows(1, 4, 16, 4) == 4
