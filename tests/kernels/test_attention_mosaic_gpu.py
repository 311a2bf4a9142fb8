"""The Mosaic GPU kernels of MLA's attention on the CPU: their arithmetic by emulation, and whether they compile."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import compiled, need
from attention_cases import DOCUMENTS, SCALE, assert_near, inputs, kernels, value_and_gradients, wanted
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxprs import equations
from kda_cases import ids
from mosaic_gpu_emulator import emulated
from mosaic_gpu_sass import complaints, lost_registers

from k3train.config.errors import UserError
from k3train.kernels.attention.api import attention
from k3train.kernels.attention.mosaic_gpu import backward, forward, parts
from k3train.kernels.attention.mosaic_gpu.bounds import BLOCK, bounds
from k3train.kernels.attention.mosaic_gpu.entry import mosaic_gpu


@pytest.fixture
def on_the_cpu():
    with emulated(parts, forward, backward):
        yield


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_outputs_and_gradients_are_those_of_float64(packed, on_the_cpu):
    tokens = sum(map(abs, DOCUMENTS))
    segment_ids = ids(DOCUMENTS) if packed else None
    arguments = inputs(tokens)
    found = value_and_gradients(arguments, segment_ids)
    assert_near(found, wanted(arguments, segment_ids))
    assert found["o"].dtype == jnp.float32
    if packed:
        padding = np.asarray(segment_ids)[0] == 0
        for name in ("o", "q", "k", "shared", "v"):
            assert not np.any(np.asarray(found[name], np.float32)[0][padding]), name


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 200).map(lambda n: n if n % 5 else -n), min_size=1, max_size=5),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fuzz(lengths, spread, shuffled, seed):
    """Rows of any length and documents of any; numbers of documents need not ascend."""
    lengths = (*lengths, 7)  # one document at least
    segment_ids = np.asarray(ids(lengths))
    if shuffled:
        segment_ids = np.random.default_rng(seed).permuted(segment_ids, axis=1)
    arguments = inputs(segment_ids.shape[1], heads=1, seed=seed, spread=spread)
    with emulated(parts, forward, backward):
        found = value_and_gradients(arguments, jnp.asarray(segment_ids))
    assert_near(found, wanted(arguments, segment_ids))


def test_empty_rows_and_a_narrow_output(on_the_cpu):
    arguments = inputs(130, heads=1)
    found = value_and_gradients(arguments, jnp.zeros((1, 130), jnp.int32))
    assert all(not np.any(np.asarray(x, np.float32)) for x in found.values())
    a = arguments
    tokens = a["q"], a["k"], a["shared"], a["v"], jnp.ones((1, 130), jnp.int32)
    wide, narrow = (mosaic_gpu(*tokens, SCALE, dtype)[0] for dtype in (jnp.float32, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(wide.astype(jnp.bfloat16), np.float32))


def test_blocks_of_earlier_documents_are_not_looked_at(on_the_cpu):
    arguments, segment_ids = inputs(4 * BLOCK, heads=1), ids((2 * BLOCK, 2 * BLOCK))
    before, after = (arguments | {} for _ in range(2))
    for name in ("k", "v", "shared"):
        after[name] = arguments[name].at[:, : 2 * BLOCK].set(jnp.nan)
    first, second = (np.asarray(kernels(a, segment_ids)[0])[:, 2 * BLOCK :] for a in (before, after))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("shuffled", [False, True])
def test_bounds_hold_every_pair(shuffled):
    """No pair that may attend is left out, and blocks that are taken for alike are so."""
    rng = np.random.default_rng(4)
    numbers = np.cumsum(rng.random((3, 12 * BLOCK)) < 1 / 300, axis=1) + 1
    numbers[:, 5 * BLOCK - 20 : 6 * BLOCK + 9] = 0
    if shuffled:
        blocks = rng.permutation(12)
        numbers = numbers.reshape(3, 12, BLOCK)[:, blocks].reshape(3, -1)
    found = jax.tree.map(np.asarray, bounds(jnp.asarray(numbers, jnp.int32)))
    of = numbers.reshape(3, 12, BLOCK)
    for row in range(3):
        sets = [set(block[block != 0]) for block in of[row]]
        one = [len(set(block)) == 1 and block[0] != 0 for block in of[row]]
        for i in range(12):
            first, alike = found.first[row, i], found.alike_from[row, i]
            until, last = found.alike_until[row, i], found.last[row, i]
            assert 0 <= first <= alike <= i < until <= last <= 12
            assert not any(sets[i] & sets[j] for j in range(first))
            assert not any(sets[i] & sets[j] for j in range(last, 12))
            for j in (*range(alike, i), *range(i + 1, until)):
                assert one[i] and one[j] and sets[i] == sets[j]
            if not shuffled and sets[i]:  # nothing is looked at in vain
                assert first == i or sets[first] & sets[i]
                assert last == i + 1 or sets[last - 1] & sets[i]


def test_heads_share_the_cache():
    assert parts.heads_together(96, 8192) == 6
    assert parts.heads_together(6, 4096) == 6
    assert parts.heads_together(96, 1 << 20) == 1


def test_what_the_kernels_do_not_take_is_refused():
    a = inputs(4, heads=1)
    given = partial(attention, a["q"], a["k"], implementation="mosaic_gpu")
    with pytest.raises(UserError, match="v is bfloat16 of width 64"):
        given(a["v"][..., :64], shared=a["shared"], scale=SCALE)
    with pytest.raises(UserError, match="shared part is missing"):
        given(a["v"], scale=SCALE)
    with pytest.raises(UserError, match="does not share out a row"):
        given(a["v"], shared=a["shared"], scale=SCALE, places=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="positive scale"):
        given(a["v"], shared=a["shared"], scale=-1.0)


def test_no_square_of_scores_is_held():
    """Arrays of the whole pass are no larger than its inputs; the shared keys are not expanded to heads."""
    tokens, heads = 1024, 2
    a = inputs(tokens, heads)

    def loss(a):
        return jnp.sum(kernels(a, None)[0])

    jaxpr = jax.make_jaxpr(jax.grad(loss))({name: x for name, x in a.items() if name != "do"})
    sizes = [np.prod(v.aval.shape) for e in equations(jaxpr.jaxpr) for v in e.outvars if tokens in v.aval.shape]
    assert max(sizes) == tokens * heads * 192


@pytest.mark.slow
def test_compiles_for_h200(root, tmp_path):
    """All kernels, forward and backward, and the check of their machine code."""
    need("gpu")
    dumps = {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    compiled(str(root / "tests/mosaic_gpu_compile.py"), "attention", "96", "300", seconds=900, **dumps)
    names = {path.stem.rsplit("_", 1)[0] for path in tmp_path.glob("*.ptx")}
    assert names == {"mla_forward", "mla_queries", "mla_keys"}
    assert not complaints(tmp_path)
    assert not any(lost_registers(tmp_path).values())
