"""Branches: which folder and step they begin with, what they may change, and starting them again."""

import os
from pathlib import Path

import pytest
import tiny

from k3train.checkpoint.resolve import Found
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.run import branch as module
from k3train.run.branch import branched, parent_of, way_to_go_on
from k3train.run.directory import RunDirectory
from k3train.run.identity import STORE_KEY, DriftRefused


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The folder of a run with a checkpoint of step 8."""
    exp = tiny.experiment(tmp_path)
    with RunDirectory(exp.run.dir, exp.model_dump(mode="json")) as run:
        run.claim(STORE_KEY, "abc")
        checkpoint(run.path)

    def newest(text: str, key: str) -> Found:
        place, at, step = text.rpartition("@")
        return Found(Path(place if at else text) / "checkpoints", int(step) if at else 8)

    # Which folders are whole checkpoints is checkpoint/resolve.py's matter.
    monkeypatch.setattr(module, "locate", newest)
    return Path(exp.run.dir)


def checkpoint(run: Path) -> None:
    (run / "checkpoints" / "8").mkdir(parents=True)


def test_a_branch_begins_with_the_newest_step(trained, tmp_path):
    exp = branched(tiny.experiment(tmp_path, optim={"muon": {"lr": 0.5}}), "hot")
    assert exp.run.dir == f"{trained}-hot" and exp.run.resume == f"{trained}@8"
    parent = parent_of(exp)
    assert (parent.folder, parent.step, parent.claimed) == (str(trained), 8, {STORE_KEY: "abc"})
    assert {change.key: change.now for change in parent.changes}["optim.muon.lr"] == 0.5
    assert not {"run.dir", "run.resume"} & {change.key for change in parent.changes}


def test_a_branch_begins_with_the_step_that_is_named(trained, tmp_path):
    exp = tiny.experiment(tmp_path, run={"dir": str(tmp_path / "run"), "resume": f"{trained}@4"})
    assert branched(exp, "hot").run.resume == f"{trained}@4"


def test_the_same_command_goes_on_with_the_branch(trained, tmp_path):
    exp = tiny.experiment(tmp_path)
    first = branched(exp, "hot")
    RunDirectory(first.run.dir, first.model_dump(mode="json"), parent=parent_of(first)).close()
    (trained / "checkpoints" / "10").mkdir()  # the parent has gone on; the branch begins where it was to
    again = branched(exp, "hot")
    assert again.run.resume == f"{trained}@8"
    checkpoint(Path(first.run.dir))
    assert branched(exp, "hot").run.resume == "auto"
    assert parent_of(branched(exp, "hot")) is None


def test_frozen_keys_differ_on_no_branch(trained, tmp_path):
    exp = branched(tiny.experiment(tmp_path, data={"shuffle_seed": 3}), "hot")
    with pytest.raises(DriftRefused, match=r"data\.shuffle_seed: was 0, now 3") as caught:
        parent_of(exp)
    assert not caught.value.branchable and not Path(exp.run.dir).exists()


def test_a_folder_of_another_run_is_no_branch(trained, tmp_path):
    other = tiny.experiment(tmp_path, run={"dir": f"{trained}-hot"})
    RunDirectory(other.run.dir, other.model_dump(mode="json")).close()
    with pytest.raises(UserError, match="no branch; choose another name") as caught:
        branched(tiny.experiment(tmp_path), "hot")
    assert caught.value.exit_code == ExitCode.RUN_FOLDER


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a b"])
def test_names_that_are_none(trained, tmp_path, name):
    with pytest.raises(UserError, match="--branch") as caught:
        branched(tiny.experiment(tmp_path), name)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_run_started_again_goes_on_with_its_own_checkpoints(trained, tmp_path):
    """run.resume: PATH@STEP is where a run begins, not where it begins each time."""
    exp = tiny.experiment(tmp_path, run={"dir": str(tmp_path / "new"), "resume": f"{trained}@8"})
    assert way_to_go_on(exp.run) == f"{trained}@8" and parent_of(exp) is not None
    checkpoint(tmp_path / "new")
    assert way_to_go_on(exp.run) == "auto" and parent_of(exp) is None
    # A step of its own is a wish to go back.
    for place in (trained, f"{trained}/checkpoints", os.path.relpath(trained)):
        back = tiny.experiment(tmp_path, run={"dir": str(trained), "resume": f"{place}@8"})
        assert way_to_go_on(back.run) == f"{place}@8" and parent_of(back) is None
