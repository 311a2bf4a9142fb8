"""The Mosaic GPU kernels of the delta rule on the CPU: their arithmetic by emulation, and whether they compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import compiled, need
from golden_cases import kda as golden
from hypothesis import given, settings
from hypothesis import strategies as st
from kda_cases import (
    DOCUMENTS,
    GRADIENTS,
    RESULTS,
    assert_near,
    cotangents,
    errors,
    ids,
    inputs,
    kernels,
    value_and_gradients,
    wanted,
)
from mosaic_gpu_emulator import emulated
from mosaic_gpu_sass import lost_registers, unwritten
from test_goldens import INDEX, Case

from k3train.config.errors import UserError
from k3train.kernels.kda.api import document_starts, kda
from k3train.kernels.kda.gate import kda_gate, l2_normalize
from k3train.kernels.kda.mosaic_gpu import gradients, intra, parts, recurrence, segments
from k3train.kernels.kda.mosaic_gpu.entry import mosaic_gpu_core

GATES = ("bounded", "softplus", "given")


@pytest.fixture(autouse=True)
def on_the_cpu():
    with emulated(parts, intra, recurrence, gradients):
        yield


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("gate", GATES)
def test_outputs_and_gradients_are_the_recurrences(gate, packed):
    segment_ids = ids(DOCUMENTS) if packed else None
    arguments = inputs(130, gate=gate)
    assert_near(value_and_gradients(arguments, segment_ids, gate), wanted(arguments, segment_ids, gate))


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("decay", [-30.0, 30.0], ids=["no decay", "strongest decay"])
def test_extreme_decay(gate, decay):
    arguments = inputs(128, gate=gate, decay=decay)
    found, want = value_and_gradients(arguments, None, gate), wanted(arguments, None, gate)
    for name in ("g", "a_log", "dt_bias"):  # of nothing
        if np.linalg.norm(want[name]) < 1e-3:
            assert np.linalg.norm(np.asarray(found.pop(name), np.float64)) < 1e-2
            want.pop(name)
    assert_near(found, want)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    gate=st.sampled_from(["bounded", "softplus"]),
    lengths=st.lists(st.integers(1, 45).map(lambda n: n if n % 5 else -n), min_size=1, max_size=4),
    decay=st.sampled_from([-6.0, -2.0, 1.0]),
    repeats=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fuzz(gate, lengths, decay, repeats, seed):
    lengths = (*lengths, 7)  # one document at least
    segment_ids = ids((*lengths, sum(map(abs, lengths)) - 190))  # one shape, or the recurrence compiles ever again
    arguments = inputs(190, gate=gate, decay=decay, seed=seed)
    rng = np.random.default_rng(seed)
    beta = np.asarray(arguments["beta"])
    beta = np.where(rng.random(beta.shape) < 0.2, 30.0 * np.sign(beta), beta)  # to the bit 0 or 1 behind the sigmoid
    arguments["beta"] = jnp.asarray(beta, jnp.float32)
    if repeats:
        again = jnp.asarray(rng.random((1, segment_ids.shape[1], 1, 1)) < 0.3)
        arguments["k"] = jnp.where(again, jnp.roll(arguments["k"], 1, axis=1), arguments["k"])
    assert_near(value_and_gradients(arguments, segment_ids, gate), wanted(arguments, segment_ids, gate))


def test_documents_do_not_see_each_other():
    """Numbers of one document changed, those of the others are the same to the bit, padding and gradients included.

    To rounding only with the bounded gate, where documents in one block of 16 tokens share a reference for their decay.
    """
    segment_ids = ids(DOCUMENTS)
    before = inputs(130, gate="softplus")
    other = inputs(130, gate="softplus", seed=7)
    changed = np.asarray(segment_ids)[0] == 2
    mix = lambda a, b: jnp.where(jnp.asarray(changed)[None, :, None, None], b, a)  # noqa: E731
    after = before | {name: mix(before[name], other[name]) for name in ("q", "k", "v", "g")}
    pulled = cotangents(before, segment_ids, "softplus")
    first, second = (value_and_gradients(a, segment_ids, "softplus", pulled) for a in (before, after))
    for name in ("o", "q", "k", "v", "g"):
        kept, new = (np.asarray(x[name], np.float32)[0] for x in (first, second))
        assert np.array_equal(kept[~changed], new[~changed]), name
        assert not np.array_equal(kept[changed], new[changed]), name
    padding = np.asarray(segment_ids)[0] == 0
    for name in ("o", "q", "k", "v", "g", "beta"):
        assert not np.any(np.asarray(first[name], np.float32)[0][padding]), name


@pytest.mark.parametrize("gate", GATES)
def test_documents_of_one_token_see_it_exactly(gate):
    """All of their output is one product q k, often a small sum of large terms, so none of these may be rounded."""
    segment_ids = ids((20, *[1] * 24, 20))
    arguments = inputs(64, heads=1, gate=gate)
    alone = slice(20, 44)
    found = np.asarray(kernels(arguments, segment_ids, gate)[0], np.float64)[:, alone]
    want = np.asarray(wanted(arguments, segment_ids, gate)["o"], np.float64)[:, alone]
    far = np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.max(far) < RESULTS, far


def test_value_channels_split_over_blocks_give_the_same_bits(monkeypatch):
    arguments = inputs(70, heads=1)
    split = kernels(arguments, None, "bounded")
    monkeypatch.setattr(recurrence, "value_groups", lambda blocks: 2)
    whole = kernels(arguments, None, "bounded")
    for a, b in zip(split, whole, strict=True):
        assert np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_segments_side_by_side(packed, monkeypatch):
    """Three segments of one chunk each, as the recurrence has it."""
    monkeypatch.setattr(segments, "count", lambda *sizes: 3)
    segment_ids = ids(DOCUMENTS) if packed else None
    arguments = inputs(130)
    assert_near(value_and_gradients(arguments, segment_ids, "bounded"), wanted(arguments, segment_ids, "bounded"))


def test_narrow_heads_in_zeros():
    """Heads of width 32 filled up with zeros, with their own scale, are heads of width 32."""
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 70, 1, 32)), jnp.bfloat16) for _ in range(3))
    k = (k.astype(jnp.float32) / 8).astype(jnp.bfloat16)
    g = jnp.asarray(-rng.random((1, 70, 1, 32)), jnp.float32)
    beta = jnp.asarray(rng.random((1, 70, 1)), jnp.float32)
    fill = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, 96)])  # noqa: E731
    o, state = mosaic_gpu_core(*map(fill, (q, k, v, g)), beta, scale=32**-0.5)
    want, end = kda(*(x.astype(jnp.float32) for x in (q, k, v)), g, beta, implementation="recurrent")
    assert not np.any(np.asarray(o, np.float32)[..., 32:]) and not np.any(np.asarray(state)[..., 32:, 32:])
    found = {"o": o[..., :32], "end": state[..., :32, :32]}
    assert_near(found, {"o": np.asarray(want, np.float64), "end": np.asarray(end, np.float64)})


def _golden_arrays(arrays) -> dict[str, np.ndarray]:
    """A golden case as the kernels take it: unit keys, a log-decay, tokens that bfloat16 holds exactly."""
    held = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items() if name in (*golden.PER_TOKEN, "A_log")}
    if "A_log" in held:
        held["g"] = kda_gate(held["g"], held["A_log"], jnp.asarray(arrays["dt_bias"]), golden.bound(arrays))
        held["beta"] = jax.nn.sigmoid(held["beta"])
    if "A_log" in held or arrays["use_qk_l2norm"]:
        held["q"], held["k"] = l2_normalize(held["q"]), l2_normalize(held["k"])
    exact = {n: np.asarray(held[n].astype(jnp.bfloat16).astype(jnp.float32)) for n in ("q", "k", "v", "do")}
    scale = np.float32(arrays.get("scale", held["q"].shape[-1] ** -0.5))
    exact |= {"g": np.asarray(held["g"]), "beta": np.asarray(held["beta"]), "scale": scale, "use_qk_l2norm": False}
    return exact | {name: arrays[name] for name in ("dht", "h0", "cu_seqlens") if name in arrays}


def _golden_rows(arrays, inputs, ids, do, dht, dtype, implementation):
    """What ``golden_cases.kda`` asks of rows, in heads filled up with zeros."""

    def fill(x):
        channels = (0, 128 - x.shape[-1])
        return jnp.asarray(np.pad(x, [(0, 0)] * (x.ndim - 1) + [channels]))

    filled = {name: fill(x).astype(jnp.bfloat16) for name, x in (*((n, inputs[n]) for n in "qkv"), ("do", do))}
    states = [jnp.swapaxes(fill(np.swapaxes(fill(x), -1, -2)), -1, -2) for x in (inputs["h0"], dht)]
    ids = jnp.asarray(ids)
    options = {"starts": document_starts(ids), "valid": ids > 0, "scale": float(arrays["scale"])}

    def run(q, k, v, g, beta, state):
        return mosaic_gpu_core(q, k, v, g, beta, initial_state=state, **options)

    given_ = *(filled[n] for n in "qkv"), fill(inputs["g"]), jnp.asarray(inputs["beta"]), states[0]
    (o, state), pull = jax.vjp(run, *given_)
    got = dict(zip(("dq", "dk", "dv", "dg", "dbeta", "dh0"), pull((filled["do"], states[1])), strict=True))
    got |= {"o": o, "ht": state}
    sizes = {n: np.shape(x) for n, x in {**{f"d{n}": x for n, x in inputs.items()}, "o": do, "ht": dht}.items()}
    return {n: np.asarray(x, np.float32)[tuple(map(slice, sizes[n]))] for n, x in got.items()}


@pytest.mark.parametrize("name", [n for n in INDEX if set(INDEX[n]["arrays"]) >= golden.OP])
def test_golden(name):
    arrays = _golden_arrays(Case.load(name).arrays)
    got = golden.op(arrays, np.dtype(np.float32), "mosaic_gpu", _golden_rows)
    want = golden.op(arrays, np.dtype(np.float32), "recurrent")
    far = errors({n: got[n] for n in want}, want)
    print("  ".join(f"{n.removeprefix('out_')} {error:.1e}" for n, error in far.items()))
    # Where every key is the same, entries of the inverse cancel each other, and they are passed on in bfloat16.
    limit = 1.25e-2 if name == "kda_same_key" else GRADIENTS
    assert all(error <= (RESULTS if n in ("out_o", "out_ht") else limit) for n, error in far.items()), far


def test_narrow_shapes_are_cut_into_segments():
    assert segments.count(1, 12, 1024) == 4
    assert segments.count(1, 2, 1024) == 32
    assert [segments.count(*sizes) for sizes in ((1, 96, 128), (8, 16, 32), (1, 12, 16), (1, 32, 1024))] == [1] * 4


def test_other_widths_are_refused():
    narrow = jnp.zeros((1, 4, 1, 64), jnp.bfloat16)
    with pytest.raises(UserError, match="width 64"):
        mosaic_gpu_core(narrow, narrow, narrow, narrow, jnp.zeros((1, 4, 1)))


def test_the_check_of_machine_code_finds_a_lost_register():
    good = "S2R R4, SR;\nIMAD R5, R1, R2, R3;\nLDS.64 R6, [R2];\nHGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], !UPT;"
    assert unwritten(good) == []
    lost = good.replace("LDS.64", "LDS")
    assert unwritten(lost) == [(4, ["R7"])]


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "heads", "tokens"), [("bounded", 96, 130), ("softplus", 2, 2048), ("given", 96, 130)])
def test_compiles_for_h200(gate, heads, tokens, root, tmp_path):
    """All kernels, forward and backward, and the check of their machine code."""
    need("gpu")
    script, dumps = str(root / "tests/mosaic_gpu_compile.py"), {"MOSAIC_GPU_DUMP_PTX": "1"}
    dumps["MOSAIC_GPU_DUMP_TO"] = str(tmp_path)
    said = compiled(script, gate, str(heads), str(tokens), seconds=900, **dumps)
    # At most twice what passes.backward says, in whole chunks.
    assert int(said) < 2 * heads * -(-tokens // 64) * 64 * 2824
    names = {path.stem.rsplit("_", 1)[0] for path in tmp_path.glob("*.ptx")}
    expected = {"kda_intra", "kda_recurrence", "kda_states", "kda_reverse", "kda_gradients"}
    assert names == expected | ({"kda_end", "kda_transition", "kda_reverse_end"} if tokens > 1000 else set())
    assert not any(lost_registers(tmp_path).values())
