"""Whole runs as a person starts them: train, stop, resume, evaluate, generate, bad input."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from launch import environment

from k3train.config.exit_codes import ExitCode

SAMPLE = {"prompts": ["ab"], "tokens": 8}


def k3train(*args, timeout: float = 240, devices: int = 1, **extra) -> subprocess.CompletedProcess:
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "k3train", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(devices) | extra,
    )


def config(folder: Path, name: str = "run", data: Path | None = None, **sections) -> Path:
    """An experiment file under ``folder`` whose run folder is ``folder/name``; its text and store lie in ``data``."""
    defaults = {"model": tiny.SHALLOW, "sample": SAMPLE}
    exp = tiny.experiment(data or folder, **{**defaults, **sections, "run": {"dir": str(folder / name)}})
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return file


def metrics(run: Path, key: str = "train/loss") -> dict[int, float]:
    """Values of one metric by step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run of four steps, ``run``."""
    folder = tmp_path_factory.mktemp("whole")
    tiny.write_text(folder)
    done = k3train("train", config(folder, eval={"every": 2}))
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_a_run_leaves_what_it_promises(whole: Path):
    run = whole / "run"
    names = set(json.loads((run / "metrics.jsonl").read_text().splitlines()[0]))
    for name in (
        "train/loss",
        "train/grad_norm/muon",
        "train/update_norm/adamw",
        "moe/maxvio",
        "moe/dead_experts",
        "moe/router_entropy",
        "moe/bias_absmax",
        "kda/decay_mean",
        "attnres/entropy",
        "attn/max_logit",
        "data/batch_hash",
        "perf/tokens_per_s",
        "perf/compile_s",
    ):
        assert name in names, name
    assert sorted(metrics(run)) == [1, 2, 3, 4] and sorted(metrics(run, "eval/holdout/bpb")) == [2, 4]
    assert json.loads((run / "status.json").read_text())["last_exit"]["code"] == 0
    assert json.loads((run / "samples.jsonl").read_text().splitlines()[0])["prompt"] == "ab"
    assert sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.name.isdigit()) == [2, 4]
    assert (run / "config.yaml").exists()


def test_stopped_and_resumed_is_bit_equal(whole: Path, tmp_path: Path):
    """Ctrl-C in the middle saves and exits 13; the resumed run repeats the uninterrupted one bit for bit."""
    file = config(tmp_path, data=whole, eval={"every": 2}, checkpoint={"every": 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "k3train", "train", str(file)],
        env=environment(1),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step 1/4"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=120)[0]
    run = tmp_path / "run"
    if process.returncode == 0:
        pytest.fail("the run was over before the signal arrived:\n" + "".join(seen) + rest)
    assert process.returncode == ExitCode.STOPPED_SAVED, "".join(seen) + rest
    done = sorted(metrics(run))
    assert 1 <= len(done) < 4
    resumed = k3train("train", file)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resumed from" in resumed.stdout
    assert metrics(run) == metrics(whole / "run")
    for key in ("data/batch_hash", "train/grad_norm", "train/param_norm", "eval/holdout/bpb"):
        assert metrics(run, key).items() >= {k: v for k, v in metrics(whole / "run", key).items() if k > 2}.items()
    assert state_hash(run, 4) == state_hash(whole / "run", 4)


def state_hash(run: Path, step: int) -> str:
    """Hash of the saved state, from the checkpoint's manifest."""
    return json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())["state_hash"]["all"]


def test_four_devices_resume_what_one_began(whole: Path, tmp_path: Path):
    """The same batches on another mesh, and losses within float32 rounding."""
    first = k3train(
        "train",
        config(tmp_path, data=whole),
        "run.resume=" + f"{whole / 'run'}@2",
        "mesh.replica=2",
        "mesh.fsdp=2",
        devices=4,
    )
    assert first.returncode == 0, first.stderr[-3000:]
    got, want = metrics(tmp_path / "run"), metrics(whole / "run")
    assert sorted(got) == [3, 4]
    for step in got:
        assert got[step] == pytest.approx(want[step], rel=1e-4)
    hashes = metrics(tmp_path / "run", "data/batch_hash")
    assert hashes == {k: v for k, v in metrics(whole / "run", "data/batch_hash").items() if k > 2}


def test_evaluate_and_generate(whole: Path):
    scored = k3train("evaluate", whole / "run", "--json")
    assert scored.returncode == 0, scored.stderr[-3000:]
    result = json.loads(scored.stdout)
    assert result["bits_per_byte"] == pytest.approx(metrics(whole / "run", "eval/holdout/bpb")[4], rel=1e-5)
    written = k3train("generate", whole / "run", "ab", "--tokens", 6, "--temperature", 0)
    assert written.returncode == 0 and written.stdout.startswith("ab"), written.stderr[-3000:]


def test_weights_of_another_run(whole: Path, tmp_path: Path):
    exact = k3train(
        "train", config(tmp_path, "a", whole), f"run.init_from={whole / 'run'}", "train.steps=1", "sample.prompts=[]"
    )
    assert exact.returncode == 0, exact.stderr[-3000:]
    assert metrics(tmp_path / "a")[1] < metrics(whole / "run")[1]
    other = ["model.moe.num_experts=4", "train.steps=1", "sample.prompts=[]", f"run.init_from={whole / 'run'}"]
    refused = k3train("train", config(tmp_path, "b", whole), *other)
    assert refused.returncode == ExitCode.CHECKPOINT and "run.init_partial" in refused.stderr
    partial = k3train("train", config(tmp_path, "c", whole), *other, "run.init_partial=true")
    assert partial.returncode == 0, partial.stderr[-3000:]
    assert "router" in partial.stdout and "of another shape" in partial.stdout


def test_bad_runs_say_why(whole: Path, tmp_path: Path):
    """A foreign run folder, a missing checkpoint, too few rows, data that ends."""
    before = (whole / "run" / "metrics.jsonl").read_text()
    cases = [
        (["train", config(whole), "model.hidden_size=64"], ExitCode.RUN_FOLDER, "model.hidden_size"),
        (["train", config(tmp_path, data=whole), "run.resume=must"], ExitCode.CHECKPOINT, "no checkpoint"),
        (
            ["train", config(tmp_path, "long", whole), "data.sequence_length=65536"],
            ExitCode.CONFIG,
            "row",
        ),
        (["evaluate", tmp_path / "nowhere"], ExitCode.CHECKPOINT, "not a folder"),
    ]
    for args, code, word in cases:
        done = k3train(*args)
        assert done.returncode == code, (args, done.returncode, done.stderr[-2000:])
        assert word in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (whole / "run" / "metrics.jsonl").read_text() == before


def test_the_end_of_the_data_is_an_exit_of_its_own(whole: Path, tmp_path: Path):
    done = k3train("train", config(tmp_path, data=whole), "data.max_epochs=1", "train.steps=1000", "checkpoint.every=0")
    assert done.returncode == ExitCode.DATA_EXHAUSTED, done.stderr[-2000:]
    last = max(metrics(tmp_path / "run"))
    assert [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()] == [last]
