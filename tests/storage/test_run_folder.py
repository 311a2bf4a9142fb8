"""A run folder in an object store: its small files, its lock, and what happens when the store is away."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny
from small_state import META, make_state

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import create, delete, get, objects_below, put
from k3train.run import lease as lease_module
from k3train.run.branch import branched, parent_of
from k3train.run.directory import RunDirectory, read_attempts, read_experiment
from k3train.run.identity import DriftRefused
from k3train.run.lease import Lease
from k3train.run.mirror import Mirror, local_copy, mirror_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Mirrors lie in the test's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lease_module, "BEAT_S", 0.1)
    monkeypatch.setattr(lease_module, "STALE_S", 1.0)


def config(address: str, **sections) -> dict:
    return tiny.experiment(Path("/data"), run={"dir": address}, **sections).model_dump(mode="json")


def lost(message: str) -> None:
    raise AssertionError(message)


# The mirror


def test_the_store_is_the_truth(s3, tmp_path):
    put(f"{s3}/metrics.jsonl", b"1\n")
    put(f"{s3}/stacks/0.txt", b"stack")
    put(f"{s3}/checkpoints/5/manifest.json", b"{}")
    mirror = Mirror(s3, tmp_path / "m")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "metrics.jsonl").write_text("1\n2\n")  # more than was pushed before the process died
    (tmp_path / "m" / "left.json").write_text("{}")
    mirror.pull()
    found = {
        p.relative_to(tmp_path / "m").as_posix(): p.read_text() for p in (tmp_path / "m").rglob("*") if p.is_file()
    }
    assert found.pop(".mirror.json") and found == {"metrics.jsonl": "1\n", "stacks/0.txt": "stack"}


def test_what_changes_is_put_and_only_that(s3, tmp_path):
    mirror = Mirror(s3, tmp_path)
    (tmp_path / "processes").mkdir()
    for name in ("status.json", "metrics.jsonl", "processes/0.json", ".hidden", "run.lock"):
        (tmp_path / name).write_text("1")
    mirror.push()
    assert sorted(objects_below(s3)) == ["metrics.jsonl", "processes/0.json", "status.json"]
    put(f"{s3}/status.json", b"untouched")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("2")
    (tmp_path / "processes/0.json").unlink()
    mirror.push()
    assert get(f"{s3}/metrics.jsonl") == b"12" and get(f"{s3}/status.json") == b"untouched"
    assert sorted(objects_below(s3)) == ["metrics.jsonl", "status.json"]
    # A file that took long is not put again at once, unless it must be.
    mirror._next["metrics.jsonl"] = time.monotonic() + 60
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("3")
    mirror.push(everything=False)
    assert get(f"{s3}/metrics.jsonl") == b"12"
    mirror.push()
    assert get(f"{s3}/metrics.jsonl") == b"123"


def test_a_fetched_file_is_fetched_once(s3, tmp_path, monkeypatch):
    put(f"{s3}/metrics.jsonl", b"1")
    Mirror(s3, tmp_path).pull()
    before = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    Mirror(s3, tmp_path).pull()
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == before
    put(f"{s3}/metrics.jsonl", b"2")
    Mirror(s3, tmp_path).pull()
    assert (tmp_path / "metrics.jsonl").read_text() == "2"


# The lease


def test_one_holder_at_a_time(s3, quick):
    notes = []
    first = Lease(s3, note=notes.append, lost=lost)
    with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}") as caught:
        Lease(s3, note=notes.append, lost=lost)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER
    first.check()
    first.release()
    second = Lease(s3, note=notes.append, lost=lost)
    assert list(objects_below(f"{s3}/lock")) == ["000002.json"]
    with pytest.raises(UserError, match="was taken over"):
        first._number = 1
        first.check()
    second.release()


def test_a_silent_holder_is_replaced_and_learns_it(s3, quick):
    told, notes = [], []
    silent = Lease(s3, note=notes.append, lost=told.append)
    silent._thread.stop()  # as a stopped process or a host without network
    other = Lease(s3, note=notes.append, lost=lost)
    assert any("is taken over" in note for note in notes)
    silent._beat()
    assert "was taken over by process" in told[0]
    assert json.loads(get(f"{s3}/lock/000002.json"))["pid"] == os.getpid()
    silent.release()  # touches nothing of the other's
    other.check()
    other.release()


def test_a_holder_of_the_same_seat_is_dead(s3):
    silent = Lease(s3, note=print, lost=lost, seat="here")
    silent._thread.stop()
    began = time.monotonic()
    other = Lease(s3, note=print, lost=lost, seat="here")
    assert time.monotonic() - began < lease_module.STALE_S / 2
    other.release()


def test_many_who_want_it_at_once(s3, quick):
    won, refused = [], []

    def want():
        try:
            won.append(Lease(s3, note=lambda text: None, lost=lost))
        except UserError:
            refused.append(1)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1 and len(refused) == 5
    won[0].release()


def test_a_number_in_the_gap_is_no_lease(s3, quick):
    """Number 1 is free again once its successor is held; who was asleep and takes it has nothing."""
    put(f"{s3}/lock/000002.json", json.dumps({"pid": 1, "host": "other", "released": True}).encode())
    late = object.__new__(Lease)
    late.__dict__.update(_address=s3, _note=print, _lost=lost, _seat="", _beats=0, _name="late")
    seen = iter([0])  # what it saw before it fell asleep
    late._newest = lambda: next(seen, max(late._numbers(), default=0))
    assert late._take() == 3
    assert list(objects_below(f"{s3}/lock")) == ["000003.json"]


def test_a_lost_answer_is_no_lost_race(s3, monkeypatch):
    """The first try made the object, its answer was lost, and the second try is told that there is one."""

    def twice(path, content):
        create(path, content)
        return create(path, content)

    monkeypatch.setattr(lease_module, "create", twice)
    held = Lease(s3, note=print, lost=lost)
    assert held._number == 1
    held.release()


# The whole folder


def test_a_folder_is_opened_settled_and_found_again(s3, tmp_path):
    with RunDirectory(s3, config(s3)) as run:
        assert run.path == mirror_folder(s3) and str(run.checkpoints) == f"{s3}/checkpoints"
        assert run.begin_attempt({"versions": {}}) == 1
        (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
        run.push()
        assert get(f"{s3}/metrics.jsonl") == b'{"step": 1}\n'
        run_id = run.run_id
        with pytest.raises(UserError, match="in use by process"):
            RunDirectory(s3, config(s3))
        run.end_attempt(ExitCode.STOPPED_SAVED, "stopped", 1)
    assert read_experiment(s3)["run_id"] == run_id
    assert json.loads(get(f"{s3}/status.json"))["state"] == "ended"
    shutil.rmtree(tmp_path / "cache")  # another host
    with RunDirectory(s3, config(s3), mirror=str(tmp_path / "elsewhere")) as run:
        assert run.run_id == run_id and run.path.parent == tmp_path / "elsewhere"
        assert run.begin_attempt({"versions": {}}, 1) == 2
    assert [line["event"] for line in read_attempts(local_copy(s3))] == ["start", "end", "start"]
    with pytest.raises(DriftRefused, match=rf"{s3} holds another experiment(.|\n)*run.seed: was 0, now 3"):
        RunDirectory(s3, config(s3) | {"run": {"dir": s3, "seed": 3}})
    RunDirectory(s3, config(s3)).close()


def test_foreign_objects_are_left_alone(s3, tmp_path):
    put(f"{s3}/thesis.tex", b"mine")
    with pytest.raises(UserError, match=r"is not empty and not a run folder \(it holds thesis.tex\)"):
        RunDirectory(s3, config(s3))
    assert list(objects_below(s3)) == ["thesis.tex"]


def test_branches_in_a_store(s3):
    exp = tiny.experiment(Path("/data"), run={"dir": s3})
    with RunDirectory(s3, exp.model_dump(mode="json")):
        CheckpointManager(f"{s3}/checkpoints", CheckpointConfig()).save(5, make_state(), META, block=True)
    hot = branched(exp.model_copy(update={"train": exp.train.model_copy(update={"steps": 9})}), "hot")
    assert (hot.run.dir, hot.run.resume) == (f"{s3}-hot", f"{s3}@5")
    parent = parent_of(hot)
    assert parent.folder == s3 and [change.key for change in parent.changes] == ["train.steps"]
    with RunDirectory(hot.run.dir, hot.model_dump(mode="json"), parent=parent):
        pass
    assert read_experiment(f"{s3}-hot")["parent"]["step"] == 5


def test_other_processes_add_their_own_files(s3):
    with RunDirectory(s3, config(s3)) as run, RunDirectory(s3, config(s3), main=False, process=3) as other:
        assert other.path != run.path
        (other.path / "processes").mkdir()
        (other.path / "processes" / "3.json").write_text("{}")
    assert get(f"{s3}/processes/3.json") == b"{}"


def test_no_checkpoint_counts_before_its_records(s3, monkeypatch):
    """The lines up to a step are in the store before the step's manifest; a store that refuses them fails the save."""
    with RunDirectory(s3, config(s3)) as run:
        manager = CheckpointManager(run.checkpoints, CheckpointConfig(), before_commit=run.push)
        (run.path / "metrics.jsonl").write_text('{"step": 5}\n')
        manager.save(5, make_state(), META, block=True)
        assert get(f"{s3}/metrics.jsonl") == b'{"step": 5}\n'

        def refuse(everything=True):
            raise ConnectionError("the store is away")

        monkeypatch.setattr(run._remote._mirror, "push", refuse)
        with pytest.raises(SaveFailed, match="the store is away"):
            manager.save(10, make_state(), META, block=True)
        assert manager.steps() == [5]
        monkeypatch.undo()


def test_a_store_that_is_away_at_the_end_is_said(s3, monkeypatch, capsys):
    run = RunDirectory(s3, config(s3))
    run.begin_attempt({})

    def refuse(everything=True):
        raise ConnectionError("the store is away")

    monkeypatch.setattr(run._remote._mirror, "push", refuse)
    run.end_attempt(0, "finished", 3)
    run.close()
    err = capsys.readouterr().err
    assert "the store is away" in err and str(run.path) in err
    assert json.loads((run.path / "status.json").read_text())["state"] == "ended"  # nothing is lost
    monkeypatch.undo()


TAKEN = """
import sys, time
from k3train.run import lease
lease.BEAT_S = 0.1
from k3train.run.directory import RunDirectory
run = RunDirectory(sys.argv[1], {})
print("held", flush=True)
time.sleep(60)
"""


def test_a_trainer_that_lost_its_folder_leaves_it(s3, s3_server):
    command = [sys.executable, "-c", TAKEN, s3]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "held\n"
        assert create(f"{s3}/lock/000002.json", b'{"pid": 7, "host": "other"}')
        _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == ExitCode.RUN_FOLDER and "was taken over by process 7 on other" in err
    delete(f"{s3}/lock/000002.json")
