"""The run folder: lock, identity, foreign folders, attempts, full disks."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from k3train.config.drift import Change
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.section import Drift
from k3train.config.yaml_reader import scalar
from k3train.run import directory as module
from k3train.run.directory import RunDirectory, dump_config, read_attempts, read_experiment
from k3train.run.identity import STORE_KEY, DriftRefused, Parent
from k3train.run.status import read_status

CONFIG = {
    "run": {"dir": "runs/a", "seed": 0, "resume": "auto"},
    "model": {"vocab_size": 256, "layers": {"count": 4, "kda": [1, 2, 3], "mla": [4]}, "mtp": None},
    "data": {
        "store": "/somewhere", "sequence_length": 128, "holdout": 0.01, "shuffle_seed": 0,
        "tokenizer": {"kind": "bytes", "path": None}, "add_bos": True, "add_eos": True,
    },
    "optim": {"matrices": "muon", "muon": {"lr": 0.002}},
    "train": {"global_batch": 8, "steps": 10},
}  # fmt: skip


def with_value(key, value):
    config = json.loads(json.dumps(CONFIG))
    *branches, last = key.split(".")
    section = config
    for branch in branches:
        section = section[branch]
    section[last] = value
    return config


def train_a_little(path):
    """What a folder holds from which there is something to lose."""
    (path / "metrics.jsonl").write_text('{"step": 1}\n')


def refused(path, config=CONFIG, match=None):
    before = {entry: entry.stat().st_mtime_ns for entry in path.rglob("*")} if path.is_dir() else None
    with pytest.raises(UserError, match=match) as caught:
        RunDirectory(path, config)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER
    return before, str(caught.value)


def test_a_new_folder(tmp_path):
    with RunDirectory(tmp_path / "a" / "b", CONFIG) as run:
        assert sorted(p.name for p in run.path.iterdir()) == ["config.yaml", "experiment.json", "run.lock"]
        first = run.run_id
        assert read_experiment(run.path)["config"]["model"]["layers"]["kda"] == [1, 2, 3]
    with RunDirectory(tmp_path / "a" / "b", CONFIG) as run:
        assert run.run_id == first and run.changes == []


@pytest.mark.parametrize(
    "key, value, line, branchable",
    [
        ("model.layers.count", 5, "model.layers.count: was 4, now 5", False),
        ("model.mtp", {"mixer": "kda"}, 'model.mtp: was null, now {"mixer": "kda"}', False),
        ("run.seed", 3, "run.seed: was 0, now 3", False),
        ("data.sequence_length", 256, "data.sequence_length: was 128, now 256", True),
        ("optim.muon.lr", 0.01, "optim.muon.lr: was 0.002, now 0.01", True),
    ],
)
def test_another_experiment_is_refused_by_key(tmp_path, key, value, line, branchable):
    RunDirectory(tmp_path / "run", CONFIG).close()
    train_a_little(tmp_path / "run")
    _, message = refused(tmp_path / "run", with_value(key, value))
    assert line in message and ("on a branch only" in message) == branchable
    with pytest.raises(DriftRefused) as caught:
        RunDirectory(tmp_path / "run", with_value(key, value))
    assert caught.value.branchable == branchable
    assert (tmp_path / "run" / "config.yaml").read_text() == dump_config(CONFIG)
    RunDirectory(tmp_path / "run", CONFIG).close()  # the refusal let go of the lock


def test_a_folder_that_learned_nothing_takes_another_experiment(tmp_path):
    """An attempt that died of its config (too big, a path that is not there) is not in the way of the mended one."""
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        first = run.run_id
    with RunDirectory(tmp_path / "run", with_value("model.layers.count", 5)) as run:
        assert run.run_id == first
        assert read_experiment(run.path)["config"]["model"]["layers"]["count"] == 5
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    refused(tmp_path / "run", match=r"model\.layers\.count: was 5, now 4")


def test_free_changes_are_allowed_and_written_down(tmp_path):
    path = tmp_path / "run"
    RunDirectory(path, CONFIG).close()
    train_a_little(path)
    for before, now in ((1, 2), (2, 4)):  # against the latest attempt, not the first
        with RunDirectory(path, with_value("train.accumulation", now)) as run:
            assert run.changes == [("train.accumulation", before, now, "free")]
            run.begin_attempt({"versions": {"jax": str(now)}, "host": "any"}, 1)
    line = read_attempts(path)[-1]
    want = {"train.accumulation": [2, 4, "free"], "versions.jax": ["2", "4", "derived"]}
    assert line["changes"] == want
    event = json.loads((path / "events.jsonl").read_text().splitlines()[-1])
    assert (event["event"], event["step"], event["changes"]) == ("config", 1, want)


def test_a_start_that_came_to_nothing_leaves_the_config_of_the_run(tmp_path):
    """Else evaluate and replay would read the refused one, and the change would never be written down."""
    path = tmp_path / "run"
    with RunDirectory(path, CONFIG) as run:
        run.begin_attempt({"host": "any"})
    train_a_little(path)
    other = with_value("train.accumulation", 2)
    with RunDirectory(path, other) as run:
        run.end_attempt(ExitCode.CONFIG, "the devices do not fit")
    assert (path / "config.yaml").read_text() == dump_config(CONFIG)
    with RunDirectory(path, other) as run:
        run.begin_attempt({"host": "any"}, 1)
    assert read_attempts(path)[-1]["changes"] == {"train.accumulation": [1, 2, "free"]}
    assert (path / "config.yaml").read_text() == dump_config(other)


def test_a_branch_knows_its_parent(tmp_path):
    change = Change("optim.muon.lr", 0.002, 0.01, Drift.BRANCH)
    parent = Parent("runs/a", "0123", 7, [change], {STORE_KEY: "abc"})
    with RunDirectory(tmp_path / "run", with_value("optim.muon.lr", 0.01), parent=parent) as run:
        assert run.changes == [change]
        with pytest.raises(DriftRefused, match=r'data.content: was "abc", now "xyz"'):
            run.claim(STORE_KEY, "xyz")  # the same text as its parent's
        run.claim(STORE_KEY, "abc")
        run.begin_attempt({}, 7)
    record = read_experiment(tmp_path / "run")["parent"]
    assert record["folder"] == "runs/a" and record["run_id"] == "0123" and record["step"] == 7
    assert record["changes"] == {"optim.muon.lr": [0.002, 0.01, "branch"]}
    event = json.loads((tmp_path / "run" / "events.jsonl").read_text())
    assert (event["event"], event["step"], event["parent"]) == ("branch", 7, record)
    train_a_little(tmp_path / "run")
    with RunDirectory(tmp_path / "run", with_value("optim.muon.lr", 0.01)) as run:
        assert run.changes == [] and read_experiment(run.path)["parent"] == record


def test_the_store_is_claimed(tmp_path):
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        fingerprint = read_experiment(run.path)["fingerprint"]
        run.claim(STORE_KEY, "abc")
        run.claim(STORE_KEY, "abc")
        assert read_experiment(run.path)["fingerprint"] != fingerprint
    train_a_little(tmp_path / "run")
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        with pytest.raises(UserError, match=r'data.content: was "abc", now "xyz"'):
            run.claim(STORE_KEY, "xyz")
        run.claim(STORE_KEY, "abc")


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    before, message = refused(tmp_path, match="not empty and not a run folder")
    assert "thesis.tex" in message
    assert before == {entry: entry.stat().st_mtime_ns for entry in tmp_path.rglob("*")}
    refused(tmp_path / "thesis.tex", match="is a file")


@pytest.mark.parametrize("change", [{"config": None}, {"config": []}, {"claimed": []}, {"run_id": 7}, None])
def test_an_unreadable_record_is_refused(tmp_path, change):
    RunDirectory(tmp_path, CONFIG).close()
    train_a_little(tmp_path)
    file = tmp_path / "experiment.json"
    file.write_text('{"run_id"' if change is None else json.dumps(json.loads(file.read_text()) | change))
    refused(tmp_path, match="cannot be read")


def test_lines_of_attempts_that_no_run_wrote_are_passed_over(tmp_path):
    lines = [
        '{"event": "start"}', '{"event": "start", "attempt": "a", "time": 5}', '{"event": [1]}', "[]", '{"event": "sta',
        '{"event": "end", "attempt": 1, "seconds": "none"}', '{"event": "start", "attempt": 1, "time": 5}',
    ]  # fmt: skip
    with RunDirectory(tmp_path, CONFIG) as run:
        (tmp_path / "attempts.jsonl").write_text("\n".join(lines) + "\n")
        assert run.begin_attempt({"host": "any"}) == 2
        run.end_attempt(0, "finished")
    (tmp_path / "attempts.jsonl").unlink()
    (tmp_path / "attempts.jsonl").mkdir()
    with RunDirectory(tmp_path, CONFIG) as run, pytest.raises(UserError, match=r"attempts\.jsonl: cannot read"):
        run.begin_attempt({"host": "any"})


def test_checkpoints_that_are_a_file_are_refused_before_anything_is_trained(tmp_path):
    RunDirectory(tmp_path, CONFIG).close()
    (tmp_path / "checkpoints").write_text("x")
    refused(tmp_path, match="checkpoints is a file")


def test_a_run_that_died_at_once_leaves_a_usable_folder(tmp_path):
    (tmp_path / "run.lock").write_text("")
    RunDirectory(tmp_path, CONFIG).close()


HOLD = """
import json, sys, time
from k3train.run.directory import RunDirectory
run = RunDirectory(sys.argv[1], json.loads(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def test_two_trainers_in_one_folder(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run"), json.dumps(CONFIG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            _, message = refused(tmp_path / "run", match="in use by process")
            assert f"process {other.pid} on {os.uname().nodename}" in message
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    RunDirectory(tmp_path / "run", CONFIG).close()  # the dead hold no lock


def test_other_processes_write_nothing(tmp_path):
    run = RunDirectory(tmp_path / "run", CONFIG, main=False)
    run.claim(STORE_KEY, "abc")
    assert run.begin_attempt({}) == 0
    run.end_attempt(0, "done")
    run.close()
    assert not (tmp_path / "run").exists()


def test_attempts(tmp_path):
    path = tmp_path / "run"
    with RunDirectory(path, CONFIG) as run:
        assert run.begin_attempt({"versions": {"jax": "1"}}, None) == 1
        assert read_status(path)["state"] == "running" and read_status(path)["last_exit"] is None
        run.end_attempt(ExitCode.STOPPED_SAVED, "stopped by the user (SIGINT)", 7)
    assert read_status(path)["state"] == "ended"
    ended = read_status(path)["last_exit"]
    assert (ended["code"], ended["name"], ended["step"]) == (13, "stopped_saved", 7)
    with RunDirectory(path, CONFIG) as run:
        assert run.begin_attempt({}, 7) == 2  # and dies without an end
    with (path / "attempts.jsonl").open("a") as file:
        file.write('{"event": "sta')  # torn
    with RunDirectory(path, CONFIG) as run:
        assert run.begin_attempt({}, 7) == 3
    starts = [line for line in read_attempts(path) if line["event"] == "start"]
    assert [line["previous_ended"] for line in starts] == [None, True, False]
    assert [line["resumed_step"] for line in starts] == [None, 7, 7]
    lost = [line for line in read_attempts(path) if line["event"] == "lost"]
    assert [(line["attempt"], line["step"]) for line in lost] == [(2, 7)] and lost[0]["seconds"]["start"] >= 0


def test_an_end_before_any_attempt_is_on_record(tmp_path):
    """Data or a checkpoint were refused: the exit code is where requeue logic looks, and no attempt is counted."""
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        run.end_attempt(ExitCode.CHECKPOINT, "no checkpoint verifies")
    assert read_status(tmp_path / "run")["last_exit"]["code"] == 31
    with RunDirectory(tmp_path / "run", CONFIG) as run:
        assert run.begin_attempt({}) == 1
        assert read_status(tmp_path / "run")["last_exit"]["name"] == "checkpoint"
    assert [line["event"] for line in read_attempts(tmp_path / "run")] == ["refused", "start"]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    _, message = refused(tmp_path / "run", match="no space left")
    assert str(tmp_path / "run") in message
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.lock"]  # the probe is gone, the lock let go
    RunDirectory(tmp_path / "run", CONFIG).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the run folder"):
        RunDirectory(tmp_path / "file" / "run", CONFIG)
    with pytest.raises(UserError, match="cannot look into the run folder: File name too long"):
        RunDirectory(tmp_path / ("x" * 300), CONFIG)


def test_a_folder_that_cannot_be_looked_into(tmp_path, as_nobody):
    (tmp_path / "closed").mkdir(mode=0o700)
    with as_nobody(), pytest.raises(UserError, match="cannot look into the run folder: no permission") as caught:
        RunDirectory(tmp_path / "closed" / "run", CONFIG)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER


def test_a_real_write_limit(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: the system itself refuses the probe."""
    script = f"""
import resource, signal
from k3train.run.directory import RunDirectory
from k3train.config.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    RunDirectory({str(tmp_path / "run")!r}, {{}})
except UserError as error:
    print(int(error.exit_code), error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("33 ") and "file size" in done.stdout and done.stderr == ""


def test_config_text_survives_our_reader():
    text = dump_config({"a": "1e-4", "b": 1e-5, "c": "no", "d": [1, 2], "e": "010", "f": None, "g": "plain"})
    values = dict(line.split(": ", 1) for line in text.splitlines())
    assert scalar(values["b"]) == 1e-5 and scalar(values["g"]) == "plain" and scalar(values["f"]) is None
    assert all(values[key].startswith("'") for key in ("a", "e")) and values["d"] == "[1, 2]"
