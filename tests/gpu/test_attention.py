"""The Mosaic GPU kernels of MLA's attention on a Hopper GPU.

    K3TRAIN_TEST_PLATFORM=cuda pytest tests/gpu/test_attention.py -m gpu

Accuracy against float64, same bits twice, packed rows against separate ones, and the check of the machine code for the
ptxas fault (``mosaic_gpu_sass.py``; needs nvdisasm).
"""

import os
import subprocess
import sys
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import tool
from attention_cases import DOCUMENTS, SCALE, assert_near, inputs, kernels, value_and_gradients, wanted
from kda_cases import ids
from mosaic_gpu_sass import complaints, lost_registers

from k3train.kernels.attention.mosaic_gpu.entry import mosaic_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="no GPU: set K3TRAIN_TEST_PLATFORM=cuda on a machine with one"
    ),
]
run = jax.jit(value_and_gradients)


@pytest.mark.parametrize("tokens", [1, 128, 200, 1500])
def test_outputs_and_gradients_are_those_of_float64(tokens):
    """1,500 tokens wrap every ring of buffers several times; outputs first, so that a failure says which kernel."""
    arguments = inputs(tokens, heads=3, rows=2)
    want = wanted(arguments, None)
    o, top = jax.jit(kernels)(arguments, None)
    assert_near({"o": o, "top": top}, {name: want[name] for name in ("o", "top")})
    assert_near(run(arguments, None), want)


@pytest.mark.parametrize("lengths", [DOCUMENTS, (700, 300, -200, 500), (1,) * 300], ids=["short", "long", "single"])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_packed(lengths, spread):
    arguments, segment_ids = inputs(sum(map(abs, lengths)), heads=2, spread=spread), ids(lengths)
    want = wanted(arguments, segment_ids)
    if max(lengths) == 1:  # one key a query: the softmax is 1, and these are 0 but for rounding
        found = run(arguments, segment_ids)
        for name in ("q", "k", "shared"):
            assert np.linalg.norm(np.asarray(found.pop(name), np.float64)) < 1e-2 * np.linalg.norm(want["v"])
            want.pop(name)
        assert_near(found, want)
    else:
        assert_near(run(arguments, segment_ids), want)


def test_many_heads_and_rows():
    """Groups of heads and rows land where they belong: more thread blocks than the card holds at a time."""
    arguments, segment_ids = inputs(384, heads=24, rows=6), ids((200, 184), rows=6)
    assert_near(run(arguments, segment_ids), wanted(arguments, segment_ids))


def test_same_bits_twice():
    arguments, segment_ids = inputs(2048, heads=16, rows=2), ids((900, -148, 1000), rows=2)
    first, second = (run(arguments, segment_ids) for _ in range(2))
    for name in first:
        assert np.array_equal(np.asarray(first[name], np.float32), np.asarray(second[name], np.float32)), name


def test_packed_equals_separate():
    """Each document alone in a row against the packed row."""
    lengths = (300, 128, 1, 171)
    arguments = inputs(600)
    packed = {name: np.asarray(x, np.float32) for name, x in run(arguments, ids(lengths)).items()}
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        alone = run({name: x[:, end - length : end] for name, x in arguments.items()}, None)
        for name in ("o", "v") if length == 1 else ("o", "q", "k", "shared", "v"):
            x = np.asarray(alone[name], np.float32)
            far = np.linalg.norm(packed[name][:, end - length : end] - x) / np.linalg.norm(x)
            assert far < 8e-3, (name, length, far)


def test_narrow_output():
    a = inputs(200)
    tokens = a["q"], a["k"], a["shared"], a["v"], jnp.ones((1, 200), jnp.int32)
    wide, narrow = (
        jax.jit(mosaic_gpu, static_argnums=(5, 6))(*tokens, SCALE, dtype)[0] for dtype in ("float32", "bfloat16")
    )
    np.testing.assert_array_equal(np.asarray(narrow, np.float32), np.asarray(wide.astype(jnp.bfloat16), np.float32))


def test_machine_code_has_no_lost_register_and_products_run_on(root, tmp_path):
    missing = [name for name in ("ptxas", "nvdisasm") if tool(name) is None]
    assert not missing, f"{missing} not found: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm"
    environ = os.environ | {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(root / "tests"), *sys.path])
    command = [sys.executable, str(root / "tests/mosaic_gpu_compile.py"), "attention", "96", "300"]
    done = subprocess.run(command, env=environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    assert not any(lost_registers(tmp_path).values())
    assert not complaints(tmp_path)
