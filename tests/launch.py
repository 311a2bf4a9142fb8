"""Starts the processes of a run on this machine, as a launcher would, and looks at what they leave."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3train.parallel import distributed

# For ``before``: nothing is compiled, and the first step never ends.
NO_COMPILATION = """
import time
import k3train.train.loop as loop
from k3train.checkpoint.manager import CheckpointManager
from k3train.data.loader import Loader
from k3train.train.evaluate import Evaluator
def forever(*args, **options):
    time.sleep(600)
class Forever(dict):
    def __missing__(self, shape):
        return forever
loop.compile_steps = lambda parts, first: Forever()
Evaluator.compile = lambda self: None
"""

_SHARE = f"""
sys.path.append({str(Path(__file__).parent)!r})
import compile_once
sys.path.pop()
compile_once.share_programs()
"""

# Waits before some batch until a file named ``go`` lies in the folder: time for a test to act in.
_HOLD = """
import pathlib, time
from k3train.data.loader import Loader
following, go = Loader.__next__, pathlib.Path({folder!r}) / "go"
def held(loader):
    while loader.position == {sample} * loader.reading.length and not go.exists():
        time.sleep(0.05)
    return following(loader)
Loader.__next__ = held
"""


def hold(folder: Path, sample: int) -> str:
    """For ``before``: holds a process before the batch from ``sample`` on until ``folder`` has a file ``go``."""
    folder.mkdir(parents=True, exist_ok=True)
    return _HOLD.format(folder=str(folder), sample=sample)


def environment(devices: int = 1) -> dict[str, str]:
    """CPU with ``devices`` forced devices; programs are compiled quickly and kept for the next test."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "k3train" / "e2e"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONUNBUFFERED": "1",
    }


def meeting(count: int) -> list[dict[str, str]]:
    """Variables by which each of ``count`` processes finds the others; none for one alone."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    alike = {distributed.COORDINATOR: address, distributed.NUM_PROCESSES: str(count)}
    return [alike | {distributed.PROCESS_ID: str(i)} for i in range(count)]


class Launched:
    """``k3train train FILE OVERRIDES...`` in ``count`` processes that find each other.

    Args:
      file: what the command is about.
      logs: folder for the processes' output, ``<i>.log``.
      devices: forced CPU devices of each process.
      before: Python statements run before k3train, to put something in its way; may differ by process.
      command: another command than train.
    """

    def __init__(
        self,
        logs: Path,
        file: Path,
        *overrides: str,
        count: int = 1,
        devices: int = 1,
        before: Sequence[str] = (),
        command: str = "train",
    ):
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)
        self.processes = []
        for i, found in enumerate(meeting(count)):
            env = environment(devices) | found
            start = before[i] if i < len(before) else ""
            code = f"import sys\n{_SHARE}\n{start}\nfrom k3train.cli.main import main\nsys.exit(main(sys.argv[1:]))"
            line = [sys.executable, "-c", code, command, str(file), *overrides]
            with (logs / f"{i}.log").open("w") as log:
                self.processes.append(subprocess.Popen(line, env=env, stdout=log, stderr=subprocess.STDOUT))

    def log(self, i: int = 0) -> str:
        """What process ``i`` has said so far."""
        return (self._logs / f"{i}.log").read_text(errors="replace")

    def until(self, condition: Callable[[], Any], seconds: float = 300) -> None:
        """Wait for ``condition``; fails when the time is over or a process ends first."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s\n{self.logs()}"
            assert all(process.poll() is None for process in self.processes), f"ended first\n{self.logs()}"
            time.sleep(0.05)

    def says(self, text: str, i: int = 0) -> Callable[[], bool]:
        """Whether process ``i`` has said ``text``, as a condition."""
        return lambda: text in self.log(i)

    def send(self, number: signal.Signals, i: int = 0) -> None:
        """A signal to process ``i``."""
        self.processes[i].send_signal(number)

    def codes(self, seconds: float = 300) -> list[int]:
        """Wait for all; their exit codes."""
        end = time.monotonic() + seconds
        try:
            return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.logs()}") from None

    def logs(self) -> str:
        """The end of what all processes said."""
        return "\n".join(f"--- process {i}\n{self.log(i)[-3000:]}" for i in range(len(self.processes)))

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def values(run: Path, key: str = "train/loss") -> dict[int, Any]:
    """One metric by step; fails where a step has it twice."""
    found: dict[int, Any] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if key in line:
            assert line["step"] not in found, f"step {line['step']} twice"
            found[line["step"]] = line[key]
    return found


def state_hashes(run: Path, step: int) -> dict[str, str]:
    """Hash of each array of the state in a checkpoint, and of ``all``, from its manifest."""
    return json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())["state_hash"]


def last_exit(run: Path) -> dict[str, Any]:
    """How the run's latest attempt ended, by status.json."""
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "ended"
    return status["last_exit"]
