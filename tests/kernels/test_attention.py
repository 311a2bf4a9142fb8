"""Blockwise attention equals the written-out form, forward and gradients, on packed rows of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from k3train.kernels.attention import specs
from k3train.kernels.attention.api import attention
from k3train.kernels.attention.specs import ATOL, BFLOAT16_GRADIENT, BFLOAT16_OUTPUT, CASES, RTOL, Shape

SHAPE = Shape(2, 40, 2, 6, 4)


def inputs(rows, tokens, dtype=np.float32):
    drawn = specs.inputs(SHAPE._replace(rows=rows, tokens=tokens))
    return tuple(jnp.asarray(drawn[n], dtype) for n in ("q", "k", "v")), jnp.asarray(drawn["do"])


def value_and_grads(qkv, do, segment_ids, implementation, block=512):
    def loss(q, k, v):
        o, top = attention(q, k, v, scale=0.4, segment_ids=segment_ids, implementation=implementation, block=block)
        return jnp.sum(o * do), (o, top)

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*qkv)
    return *out, *grads


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.shape.tokens))
def test_blockwise_equals_reference(case):
    rows, tokens = case.shape[:2]
    qkv, do = inputs(rows, tokens)
    ids = jnp.asarray(specs.segment_ids(rows, tokens)) if case.packed else None
    got = value_and_grads(qkv, do, ids, "blockwise", case.block)
    want = value_and_grads(qkv, do, ids, "reference")
    for name, g, w in zip(("o", "max_logit", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=RTOL, atol=ATOL, err_msg=name)


def test_padding_gives_zeros_and_an_empty_batch_is_finite():
    qkv, do = inputs(1, 9)
    ids = jnp.asarray([[1, 1, 1, 1, 0, 0, 0, 0, 0]], jnp.int32)
    for implementation in ("blockwise", "reference"):
        o, top, *grads = value_and_grads(qkv, do, ids, implementation, 4)
        assert not np.any(np.asarray(o)[:, 4:])
        assert all(not np.any(np.asarray(g)[:, 4:]) for g in grads)
        o, top, *grads = value_and_grads(qkv, do, jnp.zeros_like(ids), implementation, 4)
        assert all(not np.any(np.asarray(x)) for x in (o, top, *grads))


def test_packed_equals_separate_documents():
    lengths = [1, 4, 5]
    qkv, do = inputs(1, sum(lengths))
    ids = jnp.asarray(np.repeat(np.arange(1, 4), lengths)[None], jnp.int32)
    o, top, *grads = value_and_grads(qkv, do, ids, "blockwise", 4)
    start, tops = 0, []
    for length in lengths:
        part = slice(start, start + length)
        o1, top1, *grads1 = value_and_grads(tuple(x[:, part] for x in qkv), do[:, part], None, "blockwise", 4)
        tops.append(top1)
        for got, want in zip((o, *grads), (o1, *grads1), strict=True):
            np.testing.assert_allclose(np.asarray(got)[:, part], want, rtol=RTOL, atol=ATOL)
        start += length
    np.testing.assert_allclose(top, np.max(tops, axis=0), rtol=1e-6)


def test_max_logit_is_of_valid_pairs_only_and_carries_no_gradient():
    (q, k, v), _ = inputs(1, 12)
    k = k.at[:, 7].multiply(100.0)  # seen from token 7 on, in document 2 only
    ids = jnp.asarray([[1] * 6 + [2] * 6], jnp.int32)
    _, top = attention(q, k, v, scale=0.4, segment_ids=ids, block=4)
    scores = 0.4 * np.einsum("thd,shd->hts", q[0], k[0])
    want = np.maximum(
        np.where(np.tri(6, dtype=bool), scores[:, :6, :6], -np.inf).max((1, 2)),
        np.where(np.tri(6, dtype=bool), scores[:, 6:, 6:], -np.inf).max((1, 2)),
    )
    np.testing.assert_allclose(top, want, rtol=1e-5)
    grad = jax.grad(lambda q: jnp.sum(attention(q, k, v, scale=0.4, block=4)[1]))(q)
    assert not np.any(np.asarray(grad))


def test_later_tokens_leave_earlier_outputs_bit_equal():
    (q, k, v), _ = inputs(1, 40)
    run = jax.jit(lambda q, k, v: attention(q, k, v, scale=0.4, block=8)[0])
    before = np.asarray(run(q, k, v))
    for t in (39, 17, 8):
        after = np.asarray(run(q.at[:, t].add(1.0), k.at[:, t].add(1.0), v.at[:, t].add(1.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert np.any(after[:, t:] != before[:, t:])


def test_bfloat16_is_close_to_the_same_inputs_in_float32():
    qkv, do = inputs(2, 40, dtype=jnp.bfloat16)
    got = value_and_grads(qkv, do, None, "blockwise", 16)
    want = value_and_grads(tuple(x.astype(jnp.float32) for x in qkv), do, None, "reference")
    assert got[0].dtype == jnp.float32
    limits = (BFLOAT16_OUTPUT,) * 2 + (BFLOAT16_GRADIENT,) * 3
    for g, w, limit in zip(got, want, limits, strict=True):
        error = np.asarray(g, np.float32) - np.asarray(w)
        assert np.linalg.norm(error) <= limit * np.linalg.norm(np.asarray(w))


def test_no_square_of_scores_is_held():
    tokens, block = 256, 32
    qkv, do = inputs(1, tokens)

    loss = lambda q, k, v: jnp.sum(attention(q, k, v, scale=0.4, block=block)[0] * do)  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*qkv)
    sizes = [np.prod(v.aval.shape) for equation in equations(jaxpr.jaxpr) for v in equation.outvars]
    assert max(sizes) == SHAPE.heads * block * tokens  # one block of scores, and nothing larger


@pytest.mark.parametrize(
    ("starts", "length", "block"), [((0, 30), 10, 4), ((5, 17, 33), 7, 16), ((0,), 40, 512)], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
def test_stretches_of_a_row_are_its_rows(starts, length, block, packed):
    """Queries that stand somewhere in the row get what they get there; keys get the gradient of these queries alone."""
    qkv, do = inputs(2, 40)
    ids = jnp.asarray(specs.segment_ids(2, 40)) if packed else None
    place = np.concatenate([np.arange(s, s + length) for s in starts])
    chosen = jnp.zeros_like(do).at[:, place].set(do[:, place])
    o, _, dq, dk, dv = value_and_grads(qkv, chosen, ids, "reference")

    def loss(q, k, v):
        o, top = attention(q, k, v, scale=0.4, segment_ids=ids, block=block, places=jnp.asarray(starts, jnp.int32))
        return jnp.sum(o * do[:, place]), (o, top)

    q = qkv[0][:, place]
    (_, (got, top)), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(q, *qkv[1:])
    want_o, want_top = attention(
        q, *qkv[1:], scale=0.4, segment_ids=ids, places=jnp.asarray(starts, jnp.int32), implementation="reference"
    )
    np.testing.assert_allclose(want_o, o[:, place], rtol=RTOL, atol=ATOL)
    for name, g, w in zip(
        ("o", "max_logit", "dq", "dk", "dv"), (got, top, *grads), (o[:, place], want_top, dq[:, place], dk, dv),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(g, w, rtol=RTOL, atol=ATOL, err_msg=name)


def test_work_follows_the_place_of_a_stretch():
    """The inner loop's length is not the row's: queries at its beginning look at one block of keys."""
    qkv, _ = inputs(1, 40)
    poisoned = tuple(x.at[:, 8:].set(jnp.nan) for x in qkv[1:])
    o, _ = attention(qkv[0][:, :8], *poisoned, scale=0.4, block=8, places=jnp.zeros(1, jnp.int32))
    assert np.all(np.isfinite(o))
