"""The TPU kernels in Pallas' TPU interpret mode against the recurrence in float64, and compiled for absent TPUs."""

import json
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import compiled, need
from golden_cases import kda as golden
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_goldens import INDEX, Case, check

from k3train.config.errors import UserError
from k3train.kernels.kda.api import kda
from k3train.kernels.kda.gate import kda_gate, l2_normalize
from k3train.kernels.kda.specs import DECAYS, Shape, inputs

# One shape for most tests, since compiling takes longer than running. Three chunks, the last one hangs over the end.
SHAPE = Shape(2, 160, 2, 128, 128)
ARGS = ("q", "k", "v", "g", "beta", "initial_state")
LOW = ("q", "k", "v")  # what training has in bfloat16
ONE_CORE = pltpu.InterpretParams()
TWO_CORES = pltpu.InterpretParams(num_cores_or_threads=2, random_seed=3, detect_races=True)  # heads in any order
OUT, GRADIENT = 8e-3, 1e-2  # relative norms that must hold for bfloat16 inputs


def rows_of(*lengths: tuple[int, ...]) -> np.ndarray:
    """Segment ids: documents of these lengths a row, negative for padding, which also fills the row."""
    ids = np.zeros((SHAPE.rows, SHAPE.tokens), np.int32)
    for row, sizes in zip(ids, lengths, strict=True):
        at = 0
        for document, size in enumerate(sizes, start=1):
            row[at : at + abs(size)] = document * (size > 0)
            at += abs(size)
    return ids


def loss(arrays, ids, do, dstate, scale, implementation):
    o, state = kda(
        *(arrays[n] for n in ARGS[:5]),
        segment_ids=ids,
        initial_state=arrays["initial_state"],
        scale=scale,
        implementation=implementation,
    )
    return jnp.sum(o.astype(do.dtype) * do) + jnp.sum(state * dstate), (o, state)


@cache
def _compiled(implementation: str, scale: float, mode: pltpu.InterpretParams | None = None):
    def run(arrays, ids, do, dstate):
        grads, (o, state) = jax.grad(loss, has_aux=True)(arrays, ids, do, dstate, scale, implementation)
        return {"o": o, "state": state, **grads}

    return jax.jit(run)


def kernel(arrays, ids, do, dstate, *, low=True, scale=128**-0.5, mode=ONE_CORE) -> dict[str, np.ndarray]:
    """Outputs and gradients by the kernels, as the simulated TPU runs them; q, k and v in bfloat16 where ``low``."""
    dtypes = {n: jnp.bfloat16 if low and n in LOW else jnp.float32 for n in ARGS}
    with pltpu.force_tpu_interpret_mode(mode):
        arrays = {n: jnp.asarray(arrays[n], dtypes[n]) for n in ARGS}
        do, dstate = jnp.asarray(do, jnp.float32), jnp.asarray(dstate, jnp.float32)
        got = _compiled("mosaic_tpu", scale, mode)(arrays, jnp.asarray(ids), do, dstate)
        assert {n: got[n].dtype for n in (*ARGS, "o")} == {**dtypes, "o": dtypes["v"]}
        return {n: np.asarray(x, np.float64) for n, x in got.items()}


def recurrence(arrays, ids, do, dstate, *, low=True, scale=128**-0.5) -> dict[str, np.ndarray]:
    """The same by the recurrence in float64, on the inputs as rounded for the kernels."""

    def rounded(n):
        x = np.asarray(arrays[n], np.float32)
        return np.asarray(x.astype(jnp.bfloat16) if low and n in LOW else x, np.float64)

    with jax.enable_x64(True):
        args = {n: jnp.asarray(rounded(n)) for n in ARGS}
        do, dstate = jnp.asarray(do, jnp.float64), jnp.asarray(dstate, jnp.float64)
        got = _compiled("recurrent", scale)(args, jnp.asarray(ids), do, dstate)
        return {n: np.asarray(x) for n, x in got.items()}


def cotangents(shape: Shape = SHAPE, seed: int = 1):
    rng = np.random.default_rng(seed)
    rows, tokens, heads, key, value = shape
    draw = lambda *size: rng.standard_normal(size).astype(jnp.bfloat16).astype(np.float32)  # noqa: E731
    return draw(rows, tokens, heads, value), draw(rows, heads, key, value)


def assert_near(got, want, out=OUT, gradient=GRADIENT):
    """Relative norm, every array by itself."""
    assert set(got) == set(want)
    for n in want:
        error = np.linalg.norm(got[n] - want[n]) / max(np.linalg.norm(want[n]), 1e-30)
        assert error <= (out if n in ("o", "state") else gradient), (n, error)


PACKED = {
    "whole": rows_of((160,), (129,)),
    "packed": rows_of((1, 15, 48, 20, -4, 60), (-70, 10, 1, 1, 64)),
    "on borders": rows_of((64, 64, 32), (16, 16, 96, -32)),
}


@pytest.mark.parametrize(
    ("packed", "decay"), [*(("packed", decay) for decay in DECAYS), ("whole", "softplus"), ("on borders", "strong")]
)
def test_bfloat16_is_near_the_recurrence(packed, decay):
    arrays, ids, cot = inputs(SHAPE, decay), PACKED[packed], cotangents()
    assert_near(kernel(arrays, ids, *cot), recurrence(arrays, ids, *cot))


def test_float32_loses_nothing():
    """What bfloat16 loses above is the rounding of results alone."""
    arrays, ids, cot = inputs(SHAPE, "strong", same_key=True), PACKED["packed"], cotangents()
    want = recurrence(arrays, ids, *cot, low=False)
    assert_near(kernel(arrays, ids, *cot, low=False), want, out=2e-6, gradient=2e-6)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=6),
    st.sampled_from(DECAYS),
    st.floats(0.01, 2.0),
    st.booleans(),
    st.sampled_from(("drawn", "zero", "one", "either")),
    st.integers(0, 5),
)
def test_any_input(runs, decay, stretch, same_key, beta, seed):
    sizes = [size for length, padded in runs for size in (length, *([-3] * padded))]
    ids = rows_of(tuple(sizes), tuple(reversed(sizes)))
    arrays = inputs(SHAPE, decay, same_key=same_key, seed=seed)
    arrays["g"] = arrays["g"] * stretch  # from near 0 to -20 and far below
    either = np.random.default_rng(seed).integers(0, 2, arrays["beta"].shape)
    match beta:
        case "zero":
            arrays["beta"] = np.zeros_like(arrays["beta"])
        case "one":
            arrays["beta"] = np.ones_like(arrays["beta"])
        case "either":
            arrays["beta"] = either.astype(np.float64)
    cot = cotangents(seed=seed)
    assert_near(kernel(arrays, ids, *cot), recurrence(arrays, ids, *cot))


def test_same_bits_twice_and_on_two_cores():
    arrays, ids, cot = inputs(SHAPE, "softplus"), PACKED["packed"], cotangents()
    first = kernel(arrays, ids, *cot)
    for mode in (ONE_CORE, TWO_CORES):
        again = kernel(arrays, ids, *cot, mode=mode)
        assert all(np.array_equal(first[n], again[n]) for n in first)


def test_padding_is_not_read():
    arrays, ids, cot = inputs(SHAPE, "bounded"), PACKED["packed"], cotangents()
    clean = kernel(arrays, ids, *cot)
    empty = ids == 0
    spoil = lambda x: np.where(empty.reshape(*empty.shape, *(1,) * (x.ndim - 2)), np.nan, x)  # noqa: E731
    spoilt = kernel(arrays | {n: spoil(arrays[n]) for n in ARGS[:5]}, ids, spoil(cot[0]), cot[1])
    for n in clean:
        assert np.array_equal(clean[n], spoilt[n]), n
    assert not np.any(clean["o"][empty]) and not any(np.any(clean[n][empty]) for n in ARGS[:5])


def test_packed_equals_separate():
    lengths = (40, 64, 56)
    arrays, (do, dstate) = inputs(SHAPE, "softplus"), cotangents()
    packed = kernel(arrays, rows_of(lengths, (160,)), do, dstate, low=False)
    bounds = np.cumsum((0, *lengths))
    front = lambda x, lo, hi: np.pad(x[:1, lo:hi], ((0, 1), (0, 160 - hi + lo), *((0, 0),) * (x.ndim - 2)))  # noqa: E731
    for i, (lo, hi) in enumerate(pairwise(bounds)):
        alone = {n: front(arrays[n], lo, hi) for n in ARGS[:5]}
        alone["initial_state"] = arrays["initial_state"] * (i == 0)
        ends = dstate * (i == len(lengths) - 1)
        got = kernel(alone, rows_of((hi - lo,), (-160,)), front(do, lo, hi), ends, low=False)
        for n in ("o", *ARGS[:5]):
            np.testing.assert_allclose(got[n][0, : hi - lo], packed[n][0, lo:hi], atol=2e-6 * np.abs(packed[n]).max())
        if i == 0:
            np.testing.assert_allclose(got["initial_state"][0], packed["initial_state"][0], atol=1e-5)
    np.testing.assert_allclose(got["state"][0], packed["state"][0], atol=1e-5)


def test_no_gradient_crosses_documents_in_any_bit():
    arrays, other = inputs(SHAPE, "bounded"), inputs(SHAPE, "none", seed=5)
    ids, (do, dstate), (do_other, _) = rows_of((50, 70, 40), (160,)), cotangents(), cotangents(seed=5)
    before = kernel(arrays, ids, do, dstate)
    own = ids == 2  # of the first row; all of the second
    own[1] = True
    mix = lambda a, b: np.where(own.reshape(*own.shape, *(1,) * (a.ndim - 2)), a, b)  # noqa: E731
    after = kernel(arrays | {n: mix(arrays[n], other[n]) for n in ARGS[:5]}, ids, mix(do, do_other), dstate)
    for n in ("o", *ARGS[:5]):
        assert np.array_equal(before[n][own], after[n][own]), n
        assert not np.array_equal(before[n][~own], after[n][~own])


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
def test_gradients_reach_the_gates_parameters(bound):
    """dA_log and ddt_bias, sums over all tokens of dg times the gate's own derivatives."""
    rng = np.random.default_rng(3)
    rows, tokens, heads, width, _ = SHAPE
    raw, bias = rng.standard_normal((rows, tokens, heads, width)), rng.standard_normal(heads * width)
    a_log = rng.uniform(0, 1, heads)
    arrays, ids, cot = inputs(SHAPE, "none"), PACKED["packed"], cotangents()

    def through(dtype, core):
        gate, back = jax.vjp(lambda *a: kda_gate(*a, bound), *(jnp.asarray(x, dtype) for x in (raw, a_log, bias)))
        z, a_log_grad, bias_grad = back(jnp.asarray(core(arrays | {"g": gate}, ids, *cot)["g"], dtype))
        return {"z": np.asarray(z), "a_log": np.asarray(a_log_grad), "bias": np.asarray(bias_grad)}

    got = through(np.float32, kernel)
    with jax.enable_x64(True):
        want = through(np.float64, recurrence)
    assert_near(got, want)


def test_rows_shorter_than_a_chunk():
    shape = Shape(1, 5, 1, 128, 128)
    arrays, cot = inputs(shape, "softplus"), cotangents(shape)
    ids = np.array([[1, 1, 2, 2, 2]], np.int32)
    want = recurrence(arrays, ids, *cot)
    assert_near(kernel(arrays, ids, *cot), want)
    with pltpu.force_tpu_interpret_mode():  # without a gradient nothing is kept for one
        low = [jnp.asarray(arrays[n], jnp.bfloat16 if n in LOW else jnp.float32) for n in ARGS]
        run = jax.jit(lambda *a: kda(*a[:5], initial_state=a[5], segment_ids=ids, implementation="mosaic_tpu"))
        o, state = (np.asarray(x, np.float64) for x in run(*low))
    assert_near({"o": o, "state": state}, {n: want[n] for n in ("o", "state")})


def _golden_rows(arrays, inputs, ids, do, dht, dtype, implementation):
    """What ``golden_cases.kda`` asks of rows, two rows at a time, padded to this file's shape."""
    raw = "A_log" in arrays
    scale = float(arrays["scale"]) if "scale" in arrays else inputs["k"].shape[-1] ** -0.5

    def prepare(p):
        q, k, g, beta = l2_normalize(p["q"]), l2_normalize(p["k"]), p["g"], p["beta"]
        if raw:
            g, beta = kda_gate(g, p["A_log"], p["dt_bias"], golden.bound(arrays)), jax.nn.sigmoid(beta)
        return {"q": q, "k": k, "v": p["v"], "g": g, "beta": beta, "h0": p["h0"]}

    back = None
    if raw or arrays["use_qk_l2norm"]:
        inputs, back = jax.vjp(prepare, {n: jnp.asarray(x, dtype) for n, x in inputs.items()})
    # The kernels' scale is 1/2 for all cases, so that one program serves them.
    ready = {n: np.asarray(inputs[n.replace("initial_state", "h0")], dtype) for n in ARGS}
    ready["q"] = ready["q"] * dtype.type(2 * scale)
    pairs = [slice(i, i + 2) for i in range(0, len(ids), 2)]
    parts = [_two_rows({n: x[at] for n, x in ready.items()}, ids[at], do[at], dht[at]) for at in pairs]
    got = {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
    got["q"], got["h0"] = got["q"] * 2 * scale, got.pop("initial_state")
    grads = {n: got[n] for n in ("q", "k", "v", "g", "beta", "h0")}
    if back is not None:
        (grads,) = back({n: jnp.asarray(x, dtype) for n, x in grads.items()})
    return {"o": got["o"], "ht": got["state"]} | {f"d{n}": np.asarray(x) for n, x in grads.items()}


def _two_rows(arrays, ids, do, dht):
    fit = lambda x, *size: np.pad(x, [(0, n - m) for n, m in zip(size, x.shape, strict=True)])  # noqa: E731
    rows, tokens, heads, key, value = SHAPE
    sizes = dict.fromkeys(("q", "k", "v", "g"), (rows, tokens, heads, key))
    sizes |= {"beta": (rows, tokens, heads), "initial_state": (rows, heads, key, value)}
    assert ids.shape[1] <= tokens
    got = kernel(
        {n: fit(np.asarray(x), *sizes[n]) for n, x in arrays.items()},
        fit(ids, rows, tokens),
        fit(do, *sizes["v"]),
        fit(dht, *sizes["initial_state"]),
        low=False,
        scale=0.5,
    )
    got = {n: x[tuple(slice(0, m) for m in arrays[n].shape)] for n, x in got.items() if n in ARGS} | {
        "o": got["o"][tuple(slice(0, m) for m in do.shape)],
        "state": got["state"][tuple(slice(0, m) for m in dht.shape)],
    }
    return got


OPS = [n for n in INDEX if set(INDEX[n]["arrays"]) >= golden.OP]


@pytest.mark.parametrize("name", OPS)
def test_golden(name):
    case = Case.load(name)
    got = golden.op(case.arrays, np.dtype(np.float32), "mosaic_tpu", _golden_rows)
    faults = check(case, {n: np.asarray(x) for n, x in got.items() if n in case.arrays}, "tol_f32")
    assert not faults, "\n".join(faults)


def test_a_shared_row_is_the_whole_row():
    shape = Shape(1, 150, 1, 128, 128)  # two devices, each with a chunk and a piece
    arrays = {n: np.asarray(x, np.float32) for n, x in inputs(shape, "bounded").items()}
    cot = cotangents(shape)
    ids = np.array([[1] * 60 + [2] * 30 + [0] * 10 + [2] * 20 + [3] * 30], np.int32)
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))
    along = P(None, "context")

    def shard(arrays, ids):
        o, state = kda(**arrays, segment_ids=ids, scale=128**-0.5, implementation="mosaic_tpu", axis="context")
        return o, state[None]

    specs = dict.fromkeys(ARGS, along) | {"initial_state": P()}
    run = jax.shard_map(shard, mesh=mesh, in_specs=(specs, along), out_specs=(along, P("context")), check_vma=False)

    def shared(arrays):
        o, states = run(arrays, ids)
        return jnp.sum(o * cot[0]) + jnp.sum(states[-1] * cot[1]), (o, states[-1])

    with pltpu.force_tpu_interpret_mode():
        grads, (o, state) = jax.jit(jax.grad(shared, has_aux=True))({n: arrays[n] for n in ARGS})
    got = {"o": o, "state": state, **grads}
    want = recurrence(arrays, ids, *cot, low=False)
    assert_near({n: np.asarray(x, np.float64) for n, x in got.items()}, want, out=1e-5, gradient=1e-5)


def test_what_the_kernels_do_not_serve_is_refused():
    narrow = inputs(Shape(1, 4, 1, 64, 64), "bounded")
    with pytest.raises(UserError, match="128"):
        kda(*(jnp.asarray(narrow[n], jnp.float32) for n in ARGS[:5]), implementation="mosaic_tpu")
    exact = inputs(Shape(1, 4, 1, 128, 128), "bounded")
    with jax.enable_x64(True), pytest.raises(UserError, match="float64"):
        kda(*(jnp.asarray(exact[n]) for n in ARGS[:5]), implementation="mosaic_tpu")


# Nothing is run: it says how many kernels the programs have that are compiled for chips.
WORKER = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from k3train.kernels.kda.api import kda
from k3train.parallel.targets import devices

along = P(None, "context")

def own(q, k, v, g, beta, ids, state):
    options = {"segment_ids": ids, "initial_state": state, "implementation": "mosaic_tpu"}
    whole, _ = kda(q, k, v, g, beta, **options)
    shared, state = kda(q, k, v, g, beta, axis="context", **options)
    return whole, shared, state[None]

def kernels(target):
    mesh = Mesh(np.asarray(devices(target, 4)[:2]), ("context",))
    specs, outs = (*(along,) * 6, P()), (along, along, P("context"))
    run = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False)
    loss = lambda args: sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in run(*args))
    def shape(spec, *size, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))
    row = (1, 2 * 250, 3, 128)
    args = [shape(along, *row, dtype=jnp.bfloat16)] * 2 + [shape(along, *row)] * 2 + [shape(along, *row[:3])]
    args += [shape(along, *row[:2], dtype=jnp.int32), shape(P(), 1, 3, 128, 128)]
    grad = jax.jit(jax.grad(loss, allow_int=True)).trace(args).lower().compile()
    return grad.as_text().count('custom_call_target="tpu_custom_call"')

print(json.dumps({target: kernels(target) for target in ("v5p", "v6e")}))
"""


def test_compiles_for_tpus():
    need("tpu")
    # Forward and backward of the whole row, and both with their summaries of the shared one.
    assert json.loads(compiled("-c", WORKER)) == {"v5p": 6, "v6e": 6}
