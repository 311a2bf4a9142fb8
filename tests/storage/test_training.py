"""A whole run in an object store: killed, its newest checkpoint damaged, gone on with from another host's mirror."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from launch import Launched, environment, values

from k3train.cli.main import main
from k3train.config.object_store import get, objects_below, put
from k3train.run.mirror import Mirror

STEPS = 12
# A holder that was killed is given up on sooner than in earnest.
HURRY = "from k3train.run import lease; lease.BEAT_S, lease.STALE_S = 0.5, 3.0"


def experiment(folder: Path, run: str, mirror: str) -> Path:
    exp = tiny.experiment(
        folder,
        model=tiny.SHALLOW,
        train={"steps": STEPS},
        checkpoint={"every": 2, "keep": 3},
        run={"dir": run, "mirror": str(folder / mirror)},
    )
    file = folder / f"{mirror}.yaml"
    file.write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return file


def manifest(run: str, step: int) -> dict | None:
    found = get(f"{run}/checkpoints/{step}/manifest.json")
    return json.loads(found) if found else None


@pytest.mark.slow
def test_killed_damaged_and_resumed(s3, tmp_path):
    tiny.write_text(tmp_path)
    whole = tmp_path / "whole"
    with Launched(tmp_path / "logs0", experiment(tmp_path, str(whole), "none")) as launched:
        assert launched.codes() == [0], launched.logs()

    with Launched(tmp_path / "logs1", experiment(tmp_path, s3, "one"), before=[HURRY]) as launched:
        launched.until(lambda: manifest(s3, 6))
        launched.send(signal.SIGKILL)
        launched.codes()
    there = objects_below(f"{s3}/checkpoints")
    steps = sorted({int(name.split("/")[0]) for name in there if name.endswith("/manifest.json")})
    assert steps[-1] < STEPS, "the run was over before it was killed"
    # What the newest checkpoint stands for is in the store, whatever the killed process still had to put.
    lines = [json.loads(line) for line in get(f"{s3}/metrics.jsonl").splitlines()]
    assert set(range(1, steps[-1] + 1)) <= {line["step"] for line in lines}
    data = max(
        (name for name in there if name.startswith(f"{steps[-1]}/") and "/d/" in name), key=lambda n: there[n].size
    )
    content = bytearray(get(f"{s3}/checkpoints/{data}"))
    content[len(content) // 2] ^= 1
    put(f"{s3}/checkpoints/{data}", bytes(content))

    with Launched(tmp_path / "logs2", experiment(tmp_path, s3, "two"), before=[HURRY]) as launched:
        assert launched.codes() == [0], launched.logs()
        log = launched.log()
    assert "is taken over" in log and f"at step {steps[-2]}" in log
    assert get(f"{s3}/checkpoints/{steps[-1]}/quarantined.json")
    # One gap-free record, and the undisturbed run's numbers to the bit.
    Mirror(s3, tmp_path / "read").pull()
    for key in ("train/loss", "data/batch_hash", "train/grad_norm"):
        assert values(tmp_path / "read", key) == values(whole, key)
    assert sorted(values(tmp_path / "read")) == list(range(1, STEPS + 1))
    final = json.loads((whole / "checkpoints" / str(STEPS) / "manifest.json").read_text())
    assert manifest(s3, STEPS)["state_hash"] == final["state_hash"]
    status = json.loads(get(f"{s3}/status.json"))
    assert status["last_exit"]["name"] == "finished" and status["attempt"] == 2

    command = [sys.executable, "-m", "k3train", "evaluate", s3, "--json"]
    scored = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert scored.returncode == 0, scored.stderr[-3000:]
    assert json.loads(scored.stdout)["loss"] == pytest.approx(values(whole, "eval/holdout/loss")[STEPS], rel=1e-5)
    assert main(["ckpt", "verify", s3]) == 0
    assert not Path("s3:").exists(), "an address was taken for a folder"


@pytest.mark.slow
def test_two_processes_save_and_one_goes_on(s3, tmp_path):
    """Each process writes its own arrays into the store; what one process reads has the hash that two gave it."""
    tiny.write_text(tmp_path)
    file = experiment(tmp_path, s3, "two")
    overrides = ["train.steps=2", "checkpoint.every=0", "eval.max_rows=4"]
    with Launched(tmp_path / "logs1", file, *overrides, count=2) as launched:
        assert launched.codes() == [0, 0], launched.logs()
    there = objects_below(s3)
    assert {f"processes/{i}.json" for i in (0, 1)} <= set(there)
    assert all(any(f"checkpoints/2/state/ocdbt.process_{i}/" in name for name in there) for i in (0, 1))
    with Launched(tmp_path / "logs2", file, *overrides) as launched:
        assert launched.codes() == [0], launched.logs()
    assert manifest(s3, 2)["state_hash"]["all"] in launched.log()
    assert json.loads(get(f"{s3}/status.json"))["attempt"] == 2
