"""A run that goes on with changed keys, as a person does it: refused, branched off, allowed."""

import json
from pathlib import Path

import tiny
from e2e.test_run import config, k3train, metrics

from k3train.config.exit_codes import ExitCode


def test_changed_keys(tmp_path: Path):
    tiny.write_text(tmp_path)
    file, run = config(tmp_path, sample={"prompts": []}), tmp_path / "run"
    first = k3train("train", file)
    assert first.returncode == 0, first.stderr[-3000:]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}

    refused = k3train("train", file, "optim.muon.lr=0.02", "train.steps=6", "data.sequence_length=16")
    assert refused.returncode == ExitCode.RUN_FOLDER
    command = f"k3train train {file} optim.muon.lr=0.02 train.steps=6 data.sequence_length=16 --branch NAME"
    assert command in refused.stderr, refused.stderr
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}

    given = ("optim.muon.lr=0.02", "optim.ema=0.9", "train.steps=6", "data.sequence_length=16", "--branch", "hot")
    done = k3train("train", file, *given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "optim.muon.lr" in done.stdout and "resumed from" in done.stdout
    assert "averaged weights begin as the weights are" in done.stdout
    branch = tmp_path / "run-hot"
    parent = json.loads((branch / "experiment.json").read_text())["parent"]
    assert parent["folder"] == str(run) and parent["step"] == 4
    assert parent["run_id"] == json.loads((run / "experiment.json").read_text())["run_id"]
    assert parent["changes"]["optim.muon.lr"] == [0.01, 0.02, "branch"]
    event = json.loads((branch / "events.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["step"]) == ("branch", 4)
    # Steps and tokens go on; rows are half as long, so twice as many were read.
    assert sorted(metrics(branch)) == [5, 6]
    assert metrics(branch, "tokens") == {5: 4 * 4 * 32 + 4 * 16, 6: 4 * 4 * 32 + 8 * 16}
    assert metrics(branch, "samples") == {5: 2 * 16 + 4, 6: 2 * 16 + 8}
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}

    again = k3train("train", file, "eval.every=3")
    assert again.returncode == 0 and "eval.every" in again.stdout and "free" in again.stdout, again.stderr[-3000:]
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["changes"]["eval.every"] == [0, 3, "free"]
