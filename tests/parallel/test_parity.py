"""One step on any mesh is one device's step: loss, every gradient, routing and statistics, float32, packed rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment, meeting

SINGLE = ("replica=8", "fsdp=8", "expert=8", "context=4", "tensor=4")
MIXED = (
    "replica=2,fsdp=4",
    "fsdp=2,expert=4",
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
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_mesh_equals_one_device(processes: int, tmp_path: Path):
    """Eight devices (four for context and tensor alone), shared out over the processes.

    One process after another number of them, since they read the programs that the first has compiled.
    """
    environ = environment(8 // processes)
    found = tmp_path / "found.jsonl"
    command = [sys.executable, str(Path(__file__).parent / "parity.py"), str(found), *SINGLE, *MIXED]
    started = []
    for i, found_by in enumerate(meeting(processes)):
        with (tmp_path / f"{i}.log").open("w") as log:
            started.append(subprocess.Popen(command, env=environ | found_by, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(3600) for process in started]
    finally:
        for process in started:
            process.kill()
    said = "\n".join((tmp_path / f"{i}.log").read_text() for i in range(processes))
    assert codes == [0] * processes, said
    assert "rematerialization" not in said, said
    print(found.read_text())
    one, *rows = map(json.loads, found.read_text().splitlines())
    assert one["margin"] > 1e-7  # else a rounding could change the routing, and nothing below would mean much
    assert [row["mesh"] for row in rows] == [*SINGLE, *MIXED]
    for row in rows:
        assert row["loss"] < LOSS and row["gradient"] < GRADIENT, row
        assert row["same_routing"] and row["near_statistics"], row
