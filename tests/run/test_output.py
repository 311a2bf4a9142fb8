"""A run outlives its output."""

import subprocess
import sys

import pytest

CODE = """
import sys
from rich.console import Console
from k3train.run.output import lasting_output

with lasting_output():
    console = Console(soft_wrap=True)
    for i in range(20000):
        console.print(f"step {i}")
        print("said plainly", file=sys.stderr)
open(sys.argv[1], "w").write("done")
sys.exit(13)
"""


@pytest.mark.parametrize("out", ["reader that leaves", "full disk"])
def test_a_run_outlives_its_output(tmp_path, out):
    command = [sys.executable, "-c", CODE, str(tmp_path / "end")]
    if out == "full disk":
        with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
            code = subprocess.run(command, stdout=full, stderr=full, timeout=60).returncode
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        code = process.wait(timeout=60)
    assert (tmp_path / "end").read_text() == "done" and code == 13
