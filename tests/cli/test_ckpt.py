"""``k3train ckpt`` on a small run of two states."""

import json
import os
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
from small_state import META, biggest, flip, make_state

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager
from k3train.cli.main import main
from k3train.run.lock import RunLock


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Steps 10 (evaluated), 20 and 25 (temporary); 25 has one other array and another key."""
    run = tmp_path_factory.mktemp("ckpt") / "run"
    config = {"checkpoint": {"keep": 9}, "run": {"seed": 0}, "optim": {"lr": 0.1}}
    manager = CheckpointManager(run / "checkpoints", CheckpointConfig(keep=9))
    manager.note_score(10, 2.5)
    manager.save(10, make_state(), META | {"config": config}, block=True)
    manager.save(20, make_state(), META | {"config": config}, block=True)
    other = make_state()
    other["opt"]["momentum"] = other["opt"]["momentum"] + jnp.bfloat16(1)
    config = config | {"optim": {"lr": 0.2}}
    manager.save(25, other, META | {"config": config}, block=True, kind="temporary")
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run [1]")


def steps(run):
    return CheckpointManager(run / "checkpoints", CheckpointConfig()).steps()


def said(capsys):
    return json.loads(capsys.readouterr().out)


def test_list(run, capsys):
    (run / "checkpoints" / "30").mkdir()
    assert main(["ckpt", "list", str(run), "--json"]) == 0
    rows = said(capsys)
    assert [(row["step"], row["kind"], row["status"], row["eval"]) for row in rows] == [
        (10, "permanent", "complete", 2.5),
        (20, "permanent", "complete", None),
        (25, "temporary", "complete", None),
        (30, "", "unfinished", None),
    ]
    assert rows[0]["state_hash"] == rows[1]["state_hash"] != rows[2]["state_hash"] and rows[0]["size"] > 1000
    assert main(["ckpt", "list", str(run)]) == 0
    out = capsys.readouterr().out
    assert "2.5000" in out and "5,120" in out and "unfinished" in out


def test_verify(run, capsys):
    assert main(["ckpt", "verify", str(run), "--all", "--json"]) == 0
    assert [entry["faults"] for entry in said(capsys)] == [[], [], []]
    flip(biggest(run / "checkpoints" / "20"))
    assert main(["ckpt", "verify", str(run)]) == 0  # the newest
    assert not capsys.readouterr().err  # no bar where nobody watches
    assert main(["ckpt", "verify", str(run), "10"]) == 0
    assert main(["ckpt", "verify", str(run), "20"]) == 31
    assert "SHA-256 differs" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(run), "--all"]) == 31
    assert main(["ckpt", "verify", str(run), "21"]) == 31
    assert "no checkpoint of step 21" in capsys.readouterr().err
    assert CheckpointManager(run / "checkpoints", CheckpointConfig()).newest_good() == 25
    assert not (run / "checkpoints" / "20" / "quarantined.json").exists()  # verify only looks


def test_prune(run, capsys):
    assert main(["ckpt", "prune", str(run)]) == 0 and "nothing to delete" in capsys.readouterr().out
    assert main(["ckpt", "keep", str(run), "10"]) == 0
    assert main(["ckpt", "prune", str(run), "--keep", "1", "--dry-run"]) == 0
    assert "nothing to delete" in capsys.readouterr().out  # 10 is kept, 20 is the newest permanent, 25 the newest
    assert main(["ckpt", "keep", str(run), "10", "--undo"]) == 0
    assert main(["ckpt", "prune", str(run), "--keep", "1", "--dry-run"]) == 0
    assert "would delete" in capsys.readouterr().out and steps(run) == [10, 20, 25]
    assert main(["ckpt", "prune", str(run), "--keep", "1", "--json"]) == 0
    assert said(capsys) == ["10"] and steps(run) == [20, 25]
    assert main(["ckpt", "prune", str(run), "--keep", "0"]) == 2


def test_prune_keeps_the_only_good_one(run, capsys):
    for step in ("20", "25"):
        flip(biggest(run / "checkpoints" / step))
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 31
    assert "nothing was deleted" in capsys.readouterr().err and steps(run) == [10, 20, 25]
    assert CheckpointManager(run / "checkpoints", CheckpointConfig()).newest_good() == 10
    assert main(["ckpt", "prune", str(run), "--set-aside"]) == 0
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["10"]


def test_prune_waits_for_no_trainer(run, capsys):
    lock = RunLock(run / "run.lock")
    assert main(["ckpt", "prune", str(run), "--keep", "1"]) == 33
    assert "is in use by" in capsys.readouterr().err and steps(run) == [10, 20, 25]
    lock.release()


def test_verify_and_prune_do_not_need_a_reader(run):
    """``... | head -1`` leaves; the exit code stays true and no deletion stops half-way."""
    flip(biggest(run / "checkpoints" / "20"))
    for arguments, code in ((["verify", "--all"], 31), (["prune", "--keep", "1"], 0)):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, "-m", "k3train", "ckpt", *arguments, str(run)], stdout=write)
        os.close(write)
        assert done.returncode == code
    assert steps(run) == [20, 25]


def test_diff(run, capsys, monkeypatch):
    assert main(["ckpt", "diff", f"{run}@10", f"{run}@20"]) == 0
    assert "4 arrays equal, 0 with other values" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{run}@20", f"{run}@latest", "--values", "--json"]) == 0
    found = said(capsys)
    assert found["config"] == {"optim.lr": [0.1, 0.2]} and found["changed"] == ["opt.momentum"]
    (values,) = found["values"]
    assert values["name"] == "opt.momentum" and 0.9 < values["max_abs"] < 1.1 and values["relative"] > 0.5
    assert main(["ckpt", "diff", f"{run}@20", f"{run}@25", "--values"]) == 0
    assert "largest difference" in capsys.readouterr().out
    assert main(["ckpt", "diff", f"{run}@20", f"{run}@26"]) == 31
    monkeypatch.chdir(run)
    assert main(["ckpt", "diff", ".@20", "checkpoints@25", "--values"]) == 0
    flip(biggest(run / "checkpoints" / "20"))
    assert main(["ckpt", "diff", ".@20", ".@25", "--values"]) == 31


def test_looking_needs_no_jax(run):
    code = (
        "import sys; from k3train.cli.main import main\n"
        f"assert main(['ckpt', 'list', {str(run)!r}]) == 0 and main(['ckpt', 'verify', {str(run)!r}]) == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
