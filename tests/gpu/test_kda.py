"""The Mosaic GPU kernels of the delta rule on a Hopper GPU.

    K3TRAIN_TEST_PLATFORM=cuda pytest tests/gpu -m gpu

Accuracy against the float64 recurrence, same bits twice, packed rows against separate ones, and the check of the
machine code for the ptxas fault (``mosaic_gpu_sass.py``; needs nvdisasm).
"""

import os
import subprocess
import sys
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import tool
from kda_cases import DOCUMENTS, assert_near, ids, inputs, kernels, value_and_gradients, wanted
from mosaic_gpu_sass import lost_registers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        jax.default_backend() != "gpu", reason="no GPU: set K3TRAIN_TEST_PLATFORM=cuda on a machine with one"
    ),
]
GATES = ("bounded", "softplus", "given")


@pytest.mark.parametrize("tokens", [1, 64, 130, 1000])
@pytest.mark.parametrize("gate", GATES)
def test_outputs_and_gradients_are_the_recurrences(gate, tokens):
    arguments = inputs(tokens, heads=3, rows=2, gate=gate)
    found = value_and_gradients(arguments, None, gate)
    assert_near(found, wanted(arguments, None, gate))


@pytest.mark.parametrize("heads", [2, 80], ids=["value channels split", "one block a head"])
@pytest.mark.parametrize("gate", GATES)
def test_packed(gate, heads):
    arguments, segment_ids = inputs(130, heads, gate=gate), ids(DOCUMENTS)
    assert_near(value_and_gradients(arguments, segment_ids, gate), wanted(arguments, segment_ids, gate))


@pytest.mark.parametrize("decay", [-30.0, -6.0, 2.0, 30.0])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_any_decay(gate, decay):
    arguments = inputs(200, gate=gate, decay=decay)
    found, want = value_and_gradients(arguments, None, gate), wanted(arguments, None, gate)
    for name in ("g", "a_log", "dt_bias"):  # of next to nothing
        if np.linalg.norm(want[name]) < 1e-3:
            assert np.linalg.norm(np.asarray(found.pop(name), np.float64)) < 1e-2
            want.pop(name)
    assert_near(found, want)


@pytest.mark.parametrize("gate", GATES)
def test_same_bits_twice(gate):
    arguments, segment_ids = inputs(1000, heads=8, rows=2, gate=gate), ids((400, -100, 500), rows=2)
    first, second = (value_and_gradients(arguments, segment_ids, gate) for _ in range(2))
    for name in first:
        assert np.array_equal(np.asarray(first[name], np.float32), np.asarray(second[name], np.float32)), name


@pytest.mark.parametrize("gate", GATES)
def test_packed_equals_separate(gate):
    """Each document alone in a row, from no state, against the packed row."""
    arguments, lengths = inputs(300, gate=gate), (100, 64, 1, 135)
    arguments["state"] = jnp.zeros_like(arguments["state"])
    run = jax.jit(partial(kernels, gate=gate), static_argnames="gate")
    packed = np.asarray(run(arguments, ids(lengths))[0], np.float32)
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        tokens = {n: arguments[n][:, end - length : end] for n in ("q", "k", "v", "g", "beta")}
        alone = np.asarray(run(arguments | tokens, ids((length,)))[0], np.float32)
        far = np.linalg.norm(packed[:, end - length : end] - alone) / np.linalg.norm(alone)
        assert far < 8e-3, (length, far)


@pytest.mark.parametrize("gate", GATES)
def test_machine_code_has_no_lost_register(gate, root, tmp_path):
    missing = [name for name in ("ptxas", "nvdisasm") if tool(name) is None]
    assert not missing, f"{missing} not found: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm"
    environ = os.environ | {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(root / "tests"), *sys.path])
    command = [sys.executable, str(root / "tests/mosaic_gpu_compile.py"), gate, "96", "130"]
    done = subprocess.run(command, env=environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=900)
    assert not done.returncode, done.stderr[-3000:]
    assert not any(lost_registers(tmp_path).values())
