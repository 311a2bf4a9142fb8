"""Bad steps in a whole run, and steps run again: the record, repetition, and a folder that stays as it is."""

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from launch import Launched

from k3train.cli.main import main
from k3train.cli.replay import worth_showing
from k3train.config.exit_codes import ExitCode
from k3train.train.replay import HASH, LOSS, NORM, Repeat, Replay, Step, free_values_at, relative

# Warming up, each update is larger than the one before: every step after the first is a spike, and none is allowed more
# than twice in a row. Step 4 is one too many.
SPIKES = {
    "schedule": {"warmup": 1.0},
    "guard": {"spikes": "skip", "warmup_steps": 1, "update_sigma": 1e-3, "loss_sigma": None, "max_in_a_row": 2},
}


def k3train(*args: object) -> subprocess.CompletedProcess:
    cache = str(Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "k3train" / "e2e")
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
    }
    command = [sys.executable, "-m", "k3train", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder: Path) -> dict[str, str]:
    """Every file's name and hash."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """The folder of a run that the guard ended."""
    folder = tmp_path_factory.mktemp("stopped")
    tiny.write_text(folder)
    exp = tiny.experiment(folder, model=tiny.SHALLOW, train={"steps": 8}, optim=SPIKES, data={"holdout": 0.0})
    (folder / "run.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    done = k3train("train", folder / "run.yaml")
    assert done.returncode == ExitCode.NON_FINITE, done.stdout[-3000:] + done.stderr[-3000:]
    assert "nothing is held out" in done.stdout
    assert "max_in_a_row" in done.stdout and "WARNING: step 2: spike" in done.stdout
    return folder / "run"


def test_bad_steps_are_skipped_counted_and_written_down(stopped: Path):
    metrics = {line["step"]: line for line in lines(stopped / "metrics.jsonl") if "train/loss" in line}
    assert sorted(metrics) == [1, 2, 3, 4, 5]
    assert [metrics[s]["train/skipped"] for s in range(1, 6)] == [0, 1, 1, 1, 1]
    assert [metrics[s]["guard/skipped_in_a_row"] for s in range(1, 6)] == [0, 1, 2, 3, 4]
    assert len({metrics[s]["train/param_norm"] for s in range(1, 6)}) == 1, "a skipped step changes no weight"
    anomalies = lines(stopped / "anomalies.jsonl")
    assert [(line["step"], line["kind"], line["action"]) for line in anomalies] == [
        (step, "spike", "skipped") for step in range(2, 6)
    ]
    second = anomalies[0]
    assert second["data/batch_hash"] == metrics[2]["data/batch_hash"] and second["first_sample"] == 4
    assert [row["sample"] for row in second["rows"]] == [4, 5, 6, 7] and all(row["documents"] for row in second["rows"])


def test_steps_are_run_again(stopped: Path):
    """From the beginning: the record to the bit, and nothing in the folder changes."""
    before = contents(stopped)
    done = k3train("replay", stopped, "--step", 2, "--times", 3, "--documents")
    assert done.returncode == 0, done.stderr[-3000:]
    for text in (
        "agree with the record to the bit",
        "ran 3 times and repeats to the bit",
        "spike, skipped",
        "documents",
    ):
        assert text in done.stdout, done.stdout
    assert "OTHER" not in done.stdout and contents(stopped) == before


def test_what_does_not_agree_is_said(stopped: Path, tmp_path: Path):
    """From a checkpoint, against a record with another batch at one step and another loss at the next."""
    other = tmp_path / "run"
    shutil.copytree(stopped, other)
    record = lines(other / "metrics.jsonl")
    for line in record:
        if line["step"] == 3:
            line["data/batch_hash"] = "0" * 16
        if line["step"] == 4 and "train/loss" in line:
            line["train/loss"] *= 1.25
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in record))
    done = k3train("replay", other, "--step", 4, "--json", "--times", 1, f"data.store={stopped.parent / 'store'}")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["from_step"] == 2 and result["repeatable"] is None
    third, fourth = result["steps"]
    assert (third["same_batch"], third["difference"]) == (False, 0)
    assert fourth["same_batch"] and fourth["difference"] == pytest.approx(0.2, rel=1e-6)


SETTINGS = """
import os
import k3train.train.replay as replay
from jax._src import xla_bridge
from k3train.config.errors import UserError
def opened(*args, **options):
    raise UserError(f"devices {xla_bridge.backends_are_initialized()}, flags {os.environ['XLA_FLAGS']}")
replay.open_run = opened
"""


def test_a_strict_run_is_replayed_with_its_settings(stopped: Path, tmp_path: Path):
    """Each process makes them before it looks for devices; the attempt that did the step counts."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["run"]["determinism"] = "strict"
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "autotune.txt").write_text("version: 3")
    before = contents(folder)
    for given, strict in ((), True), (("run.determinism=off",), False):
        with Launched(
            tmp_path / "logs", folder, *given, "--step", "2", count=2, before=[SETTINGS] * 2, command="replay"
        ) as job:
            assert job.codes() == [ExitCode.CONFIG] * 2, job.logs()
            for i in range(2):
                assert "devices False" in job.log(i), job.logs()
                for flag in ("xla_gpu_exclude_nondeterministic_ops", "xla_gpu_load_autotune_results_from"):
                    assert (flag in job.log(i)) == strict, job.logs()
    assert contents(folder) == before


NO_STEPS = [(["--step", "0"], "--step 0"), (["--step", "1", "--times", "0"], "--times 0"), (["--step", "1"], "no run")]


@pytest.mark.parametrize(("options", "word"), NO_STEPS, ids=str)
def test_what_is_no_step_of_a_run(tmp_path: Path, capsys, options: list[str], word: str):
    assert main(["replay", str(tmp_path), *options]) == ExitCode.USAGE
    assert word in capsys.readouterr().err


def test_of_many_steps_the_table_shows_the_last_and_those_that_differ():
    quiet = {"train/nonfinite": 0, "train/spike": 0, "train/skipped": 0, HASH: "a", LOSS: 1.0, NORM: 1.0}
    steps = [Step(number, quiet, quiet) for number in range(1, 101)]
    assert [step.step for step in worth_showing(steps)] == list(range(91, 101))
    steps[6] = Step(7, quiet, quiet | {LOSS: 1.5})
    steps[7] = Step(8, quiet, quiet | {HASH: "b"})
    steps[8] = Step(9, quiet | {"train/spike": 1}, quiet)
    assert [step.step for step in worth_showing(steps)] == [7, 8, 9, *range(91, 101)]
    steps = [Step(number, quiet, quiet | {LOSS: 1.5}) for number in range(1, 101)]
    assert [step.step for step in worth_showing(steps)] == [*range(1, 11), *range(91, 101)]
    assert len(worth_showing(steps[:4])) == 4


def test_relative():
    assert relative(2.0, 2.0) == relative(math.nan, math.nan) == relative(math.inf, math.inf) == 0
    assert relative(1.0, 2.0) == relative(-2.0, -1.0) == 0.5
    assert relative(1.0, math.nan) == relative(math.inf, 1.0) == math.inf


def test_what_repeats_is_judged_by_numbers_and_arrays():
    steps = [Step(1, {}, {})]
    assert Replay(0, steps, [], []).repeatable is None
    assert Replay(0, steps, [Repeat(0.0, ())], []).repeatable
    assert not Replay(0, steps, [Repeat(0.0, ()), Repeat(1e-7, ())], []).repeatable
    assert not Replay(0, steps, [Repeat(0.0, ("params.head.weight",))], []).repeatable


def test_free_keys_are_taken_back_to_the_attempt_that_did_the_step(tmp_path: Path):
    attempts = [
        {"event": "start", "resumed_step": None, "changes": {}},
        {"event": "end"},
        {"event": "start", "resumed_step": 10, "changes": {"mesh.replica": [4, 2, "free"], "eval.every": [0, 5, "free"],
                                                           "run.determinism": ["off", "strict", "free"],
                                                           "run.peer_timeout_s": [9.0, 30.0, "free"],
                                                           "versions": ["a", "b", "derived"]}},
        {"event": "start", "resumed_step": 20, "changes": {"mesh.replica": [2, 1, "free"]}},
    ]  # fmt: skip
    (tmp_path / "attempts.jsonl").write_text(
        "\n".join(json.dumps({"attempt": 1, "time": 0.0} | line) for line in attempts)
    )
    assert [free_values_at(tmp_path, step) for step in (10, 11, 20, 21)] == [
        ["mesh.replica=4", 'run.determinism="off"'], ["mesh.replica=2"], ["mesh.replica=2"], []
    ]  # fmt: skip
