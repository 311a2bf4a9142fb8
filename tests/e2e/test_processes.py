"""Several processes under jax.distributed: the same run, stopped together, and never left hanging by a dead peer."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import yaml
from launch import NO_COMPILATION, Launched, hold, last_exit, state_hashes, values

from k3train.cli.main import main
from k3train.config.exit_codes import ExitCode

ROWS = 4  # of one step
KEYS = ("train/loss", "data/batch_hash", "train/grad_norm", "eval/holdout/loss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text, store and experiment file of all runs here."""
    made = tmp_path_factory.mktemp("processes")
    tiny.write_text(made)
    exp = tiny.experiment(
        made,
        model=tiny.SHALLOW,
        train={"steps": 6},
        eval={"every": 3},
        checkpoint={"every": 4},
        mesh={"replica": 2},
        run={"dir": str(made / "run"), "peer_timeout_s": 10.0},
    )
    (made / "run.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return made


def launched(folder: Path, name: str, count: int, *overrides: str, before=()) -> Launched:
    """A run in ``folder/name``, two devices in all."""
    given = (f"run.dir={folder / name}", *overrides)
    return Launched(
        folder / f"{name}-logs", folder / "run.yaml", *given, count=count, devices=2 // count, before=before
    )


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """One process with two devices, undisturbed."""
    with launched(folder, "whole", 1) as run:
        assert run.codes() == [0], run.logs()
    return folder / "whole"


@pytest.mark.slow
def test_a_signal_to_either_stops_both_at_one_step_and_two_processes_repeat_one(folder: Path, whole: Path):
    """USR2 to process 1 and TERM to process 0, each while the other waits; then on to the end."""
    name, gate = "stopped", folder / "stopped-gate"
    before = [hold(gate, ROWS * 2)] * 2
    with launched(folder, name, 2, before=before) as run:
        run.until(waits(folder / name, attempt=1, step=2))
        run.send(signal.SIGUSR2, 1)
        time.sleep(3)
        (gate / "go").touch()
        assert run.codes(60) == [ExitCode.TIME_LIMIT_SAVED] * 2, run.logs()
    stopped = last_exit(folder / name)
    assert stopped["code"] == 11 and "SIGUSR2" in stopped["reason"] and 2 <= stopped["step"] <= 4
    (gate / "go").unlink()
    with launched(folder, name, 2, before=[hold(gate, ROWS * 4)] * 2) as run:
        run.until(waits(folder / name, attempt=2, step=4))
        run.send(signal.SIGTERM, 0)
        time.sleep(3)
        (gate / "go").touch()
        assert run.codes(60) == [ExitCode.PREEMPTED_SAVED] * 2, run.logs()
    with launched(folder, name, 2) as run:
        assert run.codes() == [0, 0], run.logs()
    for key in KEYS:
        assert values(folder / name, key) == values(whole, key), key
    assert state_hashes(folder / name, 6) == state_hashes(whole, 6)
    for i in range(2):
        record = json.loads((folder / name / "processes" / f"{i}.json").read_text())
        assert record["process"] == i and record["pid"] and record["step"] <= 6


def waits(run: Path, **wanted) -> Callable[[], bool]:
    """Whether status.json, renewed every five seconds, shows the run waiting for data at a step, as a condition."""
    wanted = {"state": "running", "phase": "data", **wanted}

    def condition() -> bool:
        file = run / "status.json"
        return file.exists() and wanted.items() <= json.loads(file.read_text()).items()

    return condition


@pytest.mark.slow
def test_control_c_saves_one_step_and_two_processes_replay_it(folder: Path, whole: Path):
    """A terminal sends INT to all that run in it; what was done then repeats, and looking leaves no trace."""
    name, gate = "interrupted", folder / "interrupted-gate"
    path = folder / name
    with launched(folder, name, 2, before=[hold(gate, ROWS * 4)] * 2) as run:
        run.until(waits(path, attempt=1, step=4))
        for i in range(2):
            run.send(signal.SIGINT, i)
        time.sleep(3)
        (gate / "go").touch()
        assert run.codes(60) == [ExitCode.STOPPED_SAVED] * 2, run.logs()
        assert not [i for i in range(2) if "Traceback" in run.log(i)], run.logs()
    stopped = last_exit(path)
    assert stopped["code"] == ExitCode.STOPPED_SAVED and "SIGINT" in stopped["reason"]
    step = stopped["step"]
    assert values(path) == {k: loss for k, loss in values(whole).items() if k <= step}
    assert main(["ckpt", "verify", str(path)]) == 0
    assert state_hashes(path, step)["all"]
    before = contents(path)
    with Launched(folder / "replay-logs", path, "--step", "4", count=2, command="replay") as run:
        assert run.codes() == [0, 0], run.logs()
        assert "agree with the record to the bit" in run.log(0), run.log(0)
        assert "step 4 ran 2 times and repeats to the bit, the state after it included" in run.log(0), run.log(0)
    assert contents(path) == before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_stop_before_the_first_step_and_one_that_waits_for_data(folder: Path):
    """Compiling for ever: both leave, with 12. One of two stuck in its loader: both leave after some patience."""
    slow = "import time, k3train.train.loop as loop\nloop.compile_steps = lambda parts, first: time.sleep(600)\n"
    with launched(folder, "compiling", 2, before=[slow, slow]) as run:
        run.until(waits(folder / "compiling", attempt=1, phase="compile"))
        run.send(signal.SIGTERM, 1)
        began = time.monotonic()
        assert run.codes(30) == [ExitCode.PREEMPTED_LOST] * 2, run.logs()
        assert time.monotonic() - began < 12
    with launched(folder, "stuck", 2, before=[NO_COMPILATION, NO_COMPILATION + hold(folder / "stuck-gate", 0)]) as run:
        run.until(waits(folder / "stuck", attempt=1, phase="step"))
        run.send(signal.SIGTERM, 0)
        assert run.codes(40) == [ExitCode.PREEMPTED_LOST] * 2, run.logs()
    assert "SIGTERM" in last_exit(folder / "stuck")["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_peer_ends_all_and_is_named(folder: Path, victim: int):
    """kill -9: the other leaves within the time limit, and says who died where.

    With process 1 the other is in a collective, which breaks at once; process 0 takes the coordination service along.
    """
    name, gate = f"killed-{victim}", folder / f"killed-{victim}-gate"
    if victim:
        before, shows = ["", hold(gate, ROWS * 2)], {"step": 2, "phase": "step"}
    else:
        before, shows = [NO_COMPILATION + hold(gate, 0)] * 2, {"step": 0}
    with launched(folder, name, 2, before=before) as run:
        run.until(waits(folder / name, attempt=1, **shows))
        time.sleep(2)  # a beat, so that step and phase are known
        began = time.monotonic()
        run.send(signal.SIGKILL, victim)
        codes = {0: 0, 1: 0}
        for i, process in enumerate(run.processes):
            codes[i] = process.wait(40)
        assert codes == {victim: -signal.SIGKILL, 1 - victim: ExitCode.PEER_LOST}, run.logs()
        assert time.monotonic() - began < 30
        assert f"process {victim} (pid {run.processes[victim].pid}" in run.log(1 - victim)
    failure = json.loads((folder / name / "first_failure.json").read_text())
    assert failure["process"] == victim and failure["pid"] == run.processes[victim].pid
    assert failure["step"] == (2 if victim else 0) and failure["phase"] == "data" and failure["host"]
    if victim == 1:
        assert last_exit(folder / name)["code"] == ExitCode.PEER_LOST


@pytest.mark.slow
def test_an_error_of_one_ends_all_with_its_code(folder: Path):
    """One process cannot read its data any more: its message and exit code are everybody's."""
    broken = """
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.loader import Loader
def breaking(loader):
    raise UserError("the disk with the shards is gone", ExitCode.CONFIG)
Loader.__next__ = breaking
"""
    with launched(folder, "broken", 2, before=[NO_COMPILATION, NO_COMPILATION + broken]) as run:
        assert run.codes() == [ExitCode.CONFIG] * 2, run.logs()
        assert "the disk with the shards is gone" in run.log(0) and "process 1" in run.log(0)
    failure = json.loads((folder / "broken" / "first_failure.json").read_text())
    assert failure["process"] == 1 and failure["code"] == ExitCode.CONFIG
    assert last_exit(folder / "broken")["code"] == ExitCode.CONFIG


@pytest.mark.slow
def test_processes_of_different_experiments_do_not_begin(folder: Path):
    """Each would begin with weights of its own seed, and nobody would notice."""
    other = ["", "sys.argv.append('run.seed=1')"]
    with launched(folder, "apart", 2, before=other) as run:
        assert run.codes() == [ExitCode.CONFIG] * 2, run.logs()
        for i in range(2):
            assert "process 1 differs from process 0" in run.log(i) and "run.seed: 0 there, 1 here" in run.log(i)
    assert not (folder / "apart" / "checkpoints").exists()
