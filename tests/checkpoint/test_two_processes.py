"""2, then 4, then 1, then 2 processes save and restore one another's checkpoints; the state's hash stays the same."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from small_state import biggest, flip

WORKER = pathlib.Path(__file__).with_name("worker.py")


def run(directory, count, *steps):
    """What each of ``count`` processes of two devices each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, directory, str(port), str(count), str(index), *map(str, steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
def test_any_number_of_processes_reads_what_any_other_wrote(tmp_path):
    directory = tmp_path / "checkpoints"
    two = run(directory, 2, 10)
    manifest = json.loads((directory / "10" / "manifest.json").read_text())
    for one in two:
        assert one["hash"] == manifest["state_hash"]["all"]
        assert "process 1" in one["failed"] or "No space left" in one["failed"]
        assert one["failures"] == 1 and one["after"] == [0, [10, 12]]
    # Each hashed a share, and together every file.
    shares = [set(one["share"]) for one in two]
    assert all(shares) and {pathlib.Path(name).name for name in manifest["files"]} == set.union(*shares)

    flip(biggest(directory / "12"))  # all processes pass it over, process 0 quarantines it
    four = run(directory, 4, 20, 10)
    assert (directory / "12" / "quarantined.json").exists()
    assert any("12" in note and "quarantined" in note for note in four[0]["notes"])
    one = run(directory, 1, 30, 22)
    again = run(directory, 2, 40, 30)
    assert {out["hash"] for out in [*two, *four, *one, *again]} == {manifest["state_hash"]["all"]}
