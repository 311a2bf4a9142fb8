"""Chunked equals recurrent, packed equals separate, and what must hold bit for bit."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.kernels.kda.api import document_starts, kda
from k3train.kernels.kda.gate import kda_gate, l2_normalize
from k3train.kernels.kda.specs import DECAYS, TOLERANCE, Shape, inputs
from k3train.kernels.numerics import wide

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)  # round the sub-blocks and the chunk of 64
ROWS = Shape(len(LENGTHS), 130, 1, 8, 12)
ARGS = ("q", "k", "v", "g", "beta")


def cast(arrays, dtype):
    return {name: jnp.asarray(a, dtype) for name, a in arrays.items()}


def front(lengths, tokens):
    """One document at the front of each row, padding after it."""
    return jnp.asarray(np.arange(tokens)[None] < np.asarray(lengths)[:, None], jnp.int32)


def packed_ids(lengths, tokens):
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.pad(ids, (0, tokens - len(ids)))[None], jnp.int32)


@cache
def value_and_grads(implementation, chunk=64):
    """(arrays, segment ids, cotangents) to (o, final state, gradients)."""

    def loss(arrays, ids, do, dstate):
        args, start = [arrays[n] for n in ARGS], arrays["initial_state"]
        o, state = kda(*args, segment_ids=ids, initial_state=start, chunk=chunk, implementation=implementation)
        return jnp.sum(wide(o) * wide(do)) + jnp.sum(state * dstate), (o, state)

    def run(arrays, ids, do, dstate):
        grads, (o, state) = jax.grad(loss, has_aux=True)(arrays, ids, do, dstate)
        return {"o": o, "state": state, **grads}

    return jax.jit(run)


@cache
def forward(implementation, chunk=64):
    return jax.jit(partial(kda, implementation=implementation, chunk=chunk))


def cotangents(shape, dtype, seed=1):
    rng = np.random.default_rng(seed)
    rows, tokens, heads, key, value = shape
    return (
        jnp.asarray(rng.standard_normal((rows, tokens, heads, value)), dtype),
        jnp.asarray(rng.standard_normal((rows, heads, key, value)), dtype),
    )


def assert_near(got, want, tolerance):
    assert set(got) == set(want)
    for name in want:
        w, g = np.asarray(want[name], np.float64), np.asarray(got[name], np.float64)
        assert np.max(np.abs(g - w)) <= tolerance * max(np.max(np.abs(w)), 1e-2), name


@pytest.mark.parametrize("same_key", [False, True], ids=["keys", "same_key"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chunked_equals_recurrent(dtype, decay, same_key):
    with jax.enable_x64(dtype is np.float64):
        arrays = cast(inputs(ROWS, decay, same_key=same_key), dtype)
        ids, cot = front(LENGTHS, ROWS.tokens), cotangents(ROWS, dtype)
        got = value_and_grads("chunked")(arrays, ids, *cot)
        want = value_and_grads("recurrent")(arrays, ids, *cot)
        assert got["o"].dtype == dtype and got["g"].dtype == dtype
        assert_near(got, want, TOLERANCE[np.dtype(dtype).name])


@pytest.mark.parametrize("chunk", [1, 2, 8, 32])
def test_chunks_of_any_size(chunk):
    shape = Shape(2, 40, 1, 4, 6)
    arrays, cot = cast(inputs(shape, "softplus"), np.float32), cotangents(shape, np.float32)
    ids = packed_ids((9, 30), 40).repeat(2, axis=0)
    got = value_and_grads("chunked", chunk)(arrays, ids, *cot)
    assert_near(got, value_and_grads("recurrent")(arrays, ids, *cot), 1e-5)


@pytest.mark.parametrize("tokens", [1, 17, 65])
def test_rows_of_any_length(tokens):
    arrays = cast(inputs(Shape(1, tokens, 1, 8, 12), "bounded"), np.float32)
    args = [arrays[n] for n in ARGS]
    got = forward("chunked")(*args, initial_state=arrays["initial_state"])
    want = forward("recurrent")(*args, initial_state=arrays["initial_state"])
    assert_near(dict(enumerate(got)), dict(enumerate(want)), 1e-5)


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_packed_equals_separate(implementation):
    lengths, tokens = (1, 15, 16, 17), 56  # chunk 16; seven tokens of padding
    shape = Shape(1, tokens, 2, 8, 8)
    arrays = cast(inputs(shape, "softplus"), np.float32)
    do, dstate = cotangents(shape, np.float32)
    bounds = np.cumsum((0, *lengths))

    def split(x):
        parts = [x[0, lo:hi] for lo, hi in pairwise(bounds)]
        return jnp.stack([jnp.pad(p, ((0, tokens - len(p)),) + ((0, 0),) * (p.ndim - 1)) for p in parts])

    separate = {n: split(arrays[n]) for n in ARGS}
    zeros = jnp.zeros((len(lengths), *dstate.shape[1:]), np.float32)
    separate["initial_state"] = zeros.at[0].set(arrays["initial_state"][0])
    run = value_and_grads(implementation, 16)
    rows = lambda a: jnp.pad(a, ((0, 3),) + ((0, 0),) * (a.ndim - 1))  # noqa: E731, one compiled shape for both
    packed = run(jax.tree.map(rows, arrays), rows(packed_ids(lengths, tokens)), rows(do), rows(dstate))
    packed = {name: value[:1] for name, value in packed.items()}
    apart = run(separate, front(lengths, tokens), split(do), zeros.at[-1].set(dstate[0]))
    joined = {}
    for name, value in apart.items():
        if name in ("state", "initial_state"):
            joined[name] = value[-1:] if name == "state" else value[:1]
        else:
            body = np.concatenate([value[n, :size] for n, size in enumerate(lengths)])
            joined[name] = np.pad(body, ((0, tokens - len(body)),) + ((0, 0),) * (body.ndim - 1))[None]
    assert_near(packed, joined, 1e-5)
    assert not np.any(packed["o"][:, bounds[-1] :])


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_nothing_before_a_perturbed_token_changes(implementation):
    shape = Shape(1, 130, 1, 8, 12)
    arrays = cast(inputs(shape, "bounded"), np.float32)
    other = cast(inputs(shape, "strong", seed=7), np.float32)
    ids = packed_ids((70, 55), 130)
    run = forward(implementation)
    before, _ = run(*(arrays[n] for n in ARGS), segment_ids=ids)
    for t in (1, 7, 8, 31, 63, 64, 70, 100, 124):
        changed = [arrays[n].at[:, t].set(other[n][:, t]) for n in ARGS]
        after, _ = run(*changed, segment_ids=ids)
        assert np.array_equal(before[:, :t], after[:, :t]), t
        assert not np.array_equal(before[:, t:], after[:, t:]), t


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_no_gradient_crosses_documents_in_any_bit(implementation):
    lengths, tokens = (15, 17, 24), 56
    shape = Shape(1, tokens, 2, 8, 8)
    arrays, other = (cast(inputs(shape, decay, seed=s), np.float32) for s, decay in enumerate(("bounded", "none")))
    (do, dstate), (do_other, _) = cotangents(shape, np.float32), cotangents(shape, np.float32, seed=5)
    run = value_and_grads(implementation, 16)
    ids = jnp.pad(packed_ids(lengths, tokens), ((0, 3), (0, 0)))  # the compiled shape of other tests
    rows = lambda a: jnp.pad(a, ((0, 3),) + ((0, 0),) * (a.ndim - 1))  # noqa: E731
    before = run(jax.tree.map(rows, arrays), ids, rows(do), rows(dstate))
    bounds = np.cumsum((0, *lengths))
    for lo, hi in pairwise(bounds):
        own = (np.arange(tokens) >= lo) & (np.arange(tokens) < hi)
        mix = lambda a, b, own=own: jnp.where(own.reshape(1, -1, *(1,) * (a.ndim - 2)), a, b)  # noqa: E731
        changed = arrays | {n: mix(arrays[n], other[n]) for n in ARGS}
        after = run(jax.tree.map(rows, changed), ids, rows(mix(do, do_other)), rows(dstate))
        for name in ("o", *ARGS):
            assert np.array_equal(before[name][0, own], after[name][0, own]), (name, lo)
            assert not np.array_equal(before[name][0, ~own], after[name][0, ~own])


def test_a_checkpointed_scan_has_the_same_gradients():
    shape = Shape(2, 17, 1, 4, 4)
    arrays = cast(inputs(shape, "bounded"), np.float32)

    def loss(arrays, run, wrap):
        def layer(v, _):
            return wrap(lambda v: v + run(*(arrays[n] for n in ("q", "k")), v, arrays["g"], arrays["beta"])[0])(v), None

        return jnp.sum(jnp.square(jax.lax.scan(layer, arrays["v"], None, length=2)[0]))

    grads = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    want = grads(arrays, forward("recurrent"), lambda f: f)
    assert_near(grads(arrays, forward("chunked", 8), jax.checkpoint), want, 1e-5)


@pytest.mark.parametrize("implementation", ["chunked", "recurrent"])
def test_padding_changes_nothing(implementation):
    shape = Shape(2, 56, 1, 8, 8)
    arrays, other = (cast(inputs(shape, "bounded", seed=s), np.float32) for s in (0, 5))
    ids = front((20, 56), 56).at[1, 10:13].set(0)  # trailing, and in the middle of a document
    run = forward(implementation, 16)
    _, state = run(*(arrays[n] for n in ARGS), segment_ids=ids, initial_state=arrays["initial_state"])
    pad = lambda n: (ids == 0).reshape(2, 56, *(1,) * (arrays[n].ndim - 2))  # noqa: E731
    filled = [jnp.where(pad(n), other[n], arrays[n]) for n in ARGS]
    o, again = run(*filled, segment_ids=ids, initial_state=arrays["initial_state"])
    assert np.array_equal(state, again)
    assert not np.any(np.asarray(o)[np.asarray(ids) == 0])
    all_padding = jnp.zeros_like(ids)
    _, untouched = run(*filled, segment_ids=all_padding, initial_state=arrays["initial_state"])
    assert_near({"state": untouched}, {"state": arrays["initial_state"]}, 1e-6)


def token_by_token(arrays, ids, scale):
    """The rule in NumPy, one row, one document after the other."""
    q, k, v, g, beta = (np.asarray(arrays[n], np.float64)[0] for n in ARGS)
    state, seen = np.array(arrays["initial_state"], np.float64)[0], None
    o = np.zeros(v.shape)
    for t, doc in enumerate(ids):
        if doc == 0:
            continue
        if seen not in (None, doc):
            state = np.zeros_like(state)
        seen = doc
        state = np.exp(g[t])[..., None] * state
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * delta[:, None]
        o[t] = scale * np.einsum("hkv,hk->hv", state, q[t])
    return {"o": o[None], "state": state[None]}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12), st.sampled_from(DECAYS))
def test_any_segmentation(runs, decay):
    tokens = 56
    ids = np.zeros(0, np.int32)
    for number, (length, padded) in enumerate(runs, start=1):
        ids = np.concatenate([ids, np.full(length, number), np.zeros(2 * padded)]).astype(np.int32)
    ids = np.pad(ids, (0, tokens))[:tokens]
    arrays = cast(inputs(Shape(1, tokens, 1, 8, 8), decay), np.float32)
    want = token_by_token(arrays, ids, scale=0.5)
    for implementation in ("chunked", "recurrent"):
        run = scaled_forward(implementation)
        o, state = run(
            *(arrays[n] for n in ARGS), segment_ids=jnp.asarray(ids[None]), initial_state=arrays["initial_state"]
        )
        assert_near({"o": o, "state": state}, want, 1e-5)


@cache
def scaled_forward(implementation):
    return jax.jit(partial(kda, implementation=implementation, chunk=16, scale=0.5))


def test_bf16_inputs_lose_nothing_inside():
    shape = Shape(1, 56, 2, 8, 8)
    half = cast(inputs(shape, "bounded"), jnp.bfloat16)
    half["g"] = half["g"].astype(jnp.float32)
    full = {n: a.astype(jnp.float32) for n, a in half.items()}
    cot = cotangents(shape, np.float32)
    ids = packed_ids((20, 36), 56)
    got = value_and_grads("chunked", 16)(half, ids, cot[0].astype(jnp.bfloat16), cot[1])
    want = value_and_grads("recurrent", 16)(full, ids, cot[0].astype(jnp.bfloat16).astype(jnp.float32), cot[1])
    assert got["o"].dtype == jnp.bfloat16 and got["state"].dtype == jnp.float32
    assert_near({"g": got["g"], "state": got["state"]}, {"g": want["g"], "state": want["state"]}, 1e-5)


def test_beta_zero_writes_nothing_and_beta_one_stores_the_value():
    shape = Shape(1, 17, 1, 8, 8)
    arrays = cast(inputs(shape, "none"), np.float32)
    args = [arrays[n] for n in ("q", "k", "v", "g")]
    _, state = forward("chunked", 16)(*args, jnp.zeros((1, 17, 1)), initial_state=arrays["initial_state"])
    assert_near({"state": state}, {"state": arrays["initial_state"]}, 1e-6)
    _, state = forward("chunked", 16)(*args, jnp.ones((1, 17, 1)), initial_state=arrays["initial_state"])
    read = jnp.einsum("bhkv,bhk->bhv", state, arrays["k"][:, -1])
    np.testing.assert_allclose(read, arrays["v"][:, -1], atol=1e-5)


def test_chunk_must_be_a_power_of_two():
    arrays = cast(inputs(Shape(1, 4, 1, 8, 8), "bounded"), np.float32)
    with pytest.raises(UserError, match="kda_chunk"):
        kda(*(arrays[n] for n in ARGS), chunk=48)


def test_document_starts():
    ids = jnp.asarray([[1, 1, 2, 0, 2, 3, 0, 0], [0, 4, 4, 0, 5, 6, 6, 6]], jnp.int32)
    want = [[0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]]
    assert np.array_equal(document_starts(ids), np.asarray(want, bool))


def test_gate_range_and_zero_rows():
    raw = jnp.asarray(np.linspace(-100, 100, 24).reshape(1, 3, 2, 4), jnp.float32)
    bounded = kda_gate(raw, jnp.zeros(2), jnp.zeros(8), -5.0)
    assert np.all(bounded <= 0) and np.all(bounded >= -5)
    unbounded = kda_gate(raw, jnp.ones(2), jnp.zeros(8), None)
    assert np.all(unbounded <= 0) and unbounded.min() < -250
    zero = jnp.zeros((1, 1, 1, 4))
    assert not np.any(l2_normalize(zero))
    grad = jax.grad(lambda x: jnp.sum(l2_normalize(x)))(zero)
    np.testing.assert_allclose(grad, 1000.0, rtol=1e-5)
