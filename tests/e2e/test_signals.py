"""One process stopped or stuck for real: in C++ code that compiles, in a loader, a save and a step that never end."""

import json
import signal
import time
from pathlib import Path

import pytest
import tiny
import yaml
from launch import NO_COMPILATION, Launched, last_exit

from k3train.config.exit_codes import ExitCode

LIMITS = {"data_s": 3.0, "step_s": 4.0, "save_s": 5.0, "grace_s": 1.0}
STUCK = {
    "data": "Loader.__next__ = forever",
    "step": "",
    "save": "CheckpointManager.save = forever\n"
    "loop.Run.steps = lambda self, step_fn: self.saver.save(self.state, self.now(1), 'permanent')",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    tiny.write_text(folder)
    exp = tiny.experiment(folder, model=tiny.SHALLOW, run={"dir": str(folder / "run"), "watchdog": LIMITS})
    (folder / "run.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return folder / "run.yaml"


def phase(run: Path) -> str:
    """What the run does, by status.json."""
    status = run / "status.json"
    return json.loads(status.read_text())["phase"] if status.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "step", "save"])
def test_a_phase_that_never_ends_is_named_and_ended(file: Path, where: str):
    run = file.parent / where
    with Launched(file.parent / f"{where}-logs", file, f"run.dir={run}", before=[NO_COMPILATION + STUCK[where]]) as job:
        assert job.codes() == [ExitCode.WATCHDOG], job.logs()
        said = job.log()
    assert f"{where} makes no progress" in said and f"run.watchdog.{where}_s" in said
    (stacks,) = (run / "stacks").iterdir()
    assert stacks.name.startswith("0-") and stacks.name.endswith(f"-{where}.txt")
    assert "in forever" in stacks.read_text() and "watchdog.py" in stacks.read_text()
    end = last_exit(run)
    assert end["code"] == ExitCode.WATCHDOG and f"stuck in {where}" in end["reason"]


@pytest.mark.slow
def test_a_signal_in_the_compiler_is_answered_at_once(file: Path, monkeypatch):
    """The compiler is C++ that nothing interrupts; no cache may shorten it."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
    run = file.parent / "compiling"
    with Launched(file.parent / "compiling-logs", file, f"run.dir={run}", "train.accumulation=2") as job:
        job.until(lambda: phase(run) == "compile")
        time.sleep(1)
        job.send(signal.SIGTERM)
        began = time.monotonic()
        assert job.codes(60) == [ExitCode.PREEMPTED_LOST], job.logs()
        assert time.monotonic() - began < 15
        assert "compiled in" not in job.log()
    assert last_exit(run)["code"] == ExitCode.PREEMPTED_LOST and "SIGTERM" in last_exit(run)["reason"]
