"""One step on any mesh is one device's step: loss, every gradient, routing and statistics, float32, packed rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SINGLE = ("replica=8", "fsdp=8", "expert=8", "context=4", "tensor=4")
MIXED = (
    "replica=2,fsdp=4",
    "fsdp=2,expert=4",
    "expert=4,context=2",
    "context=2,tensor=4",
    "replica=2,fsdp=2,expert=2",
    "fsdp=2,expert=2,context=2",
    "expert=2,context=2,tensor=2",
    "replica=2,context=2,tensor=2",
    "fsdp=2,expert=2,tensor=2",
)
LOSS, GRADIENT = 1e-5, 1e-4
"""Relative difference of the loss; max|difference| / max|gradient| of each array by itself."""


@pytest.mark.slow
def test_every_mesh_equals_one_device():
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
    }
    command = [sys.executable, str(Path(__file__).parent / "parity.py"), *SINGLE, *MIXED]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rematerialization" not in done.stderr, done.stderr[-3000:]
    one, *rows = map(json.loads, done.stdout.splitlines())
    assert one["margin"] > 1e-7  # else a rounding could change the routing, and nothing below would mean much
    assert [row["mesh"] for row in rows] == [*SINGLE, *MIXED]
    for row in rows:
        assert row["loss"] < LOSS and row["gradient"] < GRADIENT, row
        assert row["same_routing"] and row["near_statistics"], row
