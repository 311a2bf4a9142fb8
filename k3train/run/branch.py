"""Runs that begin with another run's state: ``--branch NAME`` and ``run.resume: PATH@STEP``. Imports no JAX."""

import os
import re

from k3train.checkpoint.layout import FOLDER as CHECKPOINTS
from k3train.checkpoint.resolve import locate
from k3train.config.drift import compare
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.experiment import Experiment
from k3train.run.config import RunConfig
from k3train.run.directory import has_checkpoints, read_experiment
from k3train.run.identity import Parent, refuse

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OWN = ("run.dir", "run.resume")


def branched(exp: Experiment, name: str) -> Experiment:
    """``exp`` as a branch: its folder is ``<run.dir>-NAME``, and it begins with the state of ``run.dir``.

    The newest step is taken over, or that of ``run.resume: PATH@STEP``. A branch that has been begun goes on with its
    own checkpoints, or else from the step it was to begin with, so that the same command may be given again.

    Raises:
      UserError: exit 2 for a name that is none, exit 33 where the branch's folder is another run's, exit 31 where there
        is no checkpoint to begin with.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"--branch {name!r}: give a short name of letters, digits, dots and dashes", ExitCode.USAGE)
    if exp.run.resume == "never":
        raise UserError("--branch goes on from a checkpoint, but run.resume is never; set run.resume: auto")
    folder = f"{exp.run.dir.rstrip('/')}-{name}"
    stored = read_experiment(folder)
    if stored is None:
        found = locate(exp.run.resume if "@" in exp.run.resume else exp.run.dir, "--branch")
        resume = f"{found.directory.parent}@{found.step}"
    elif stored["parent"] is None:
        raise UserError(f"{folder} is a run of its own, no branch; choose another name", ExitCode.RUN_FOLDER)
    elif has_checkpoints(folder):
        resume = "auto"
    else:
        resume = f"{stored['parent']['folder']}@{stored['parent']['step']}"
    return exp.model_copy(update={"run": exp.run.model_copy(update={"dir": folder, "resume": resume})})


def way_to_go_on(run: RunConfig) -> str:
    """``run.resume``, but ``auto`` where it names another run and this one has checkpoints of its own by now.

    A run that is started again by the same command thus goes on from where it is, not from its parent once more.
    """
    place, at, _ = run.resume.rpartition("@")
    other = bool(at) and _run_folder(place) != _run_folder(run.dir)
    return "auto" if other and has_checkpoints(run.dir) else run.resume


def parent_of(exp: Experiment) -> Parent | None:
    """The other run whose state ``run.resume`` names, compared with ``exp``; None where it names none.

    Branch keys may differ, since the new run has a folder of its own.

    Raises:
      UserError: exit 31 where that checkpoint is not there, exit 33 where frozen keys differ.
    """
    place, at, _ = way_to_go_on(exp.run).rpartition("@")
    if not at or _run_folder(place) == _run_folder(exp.run.dir):
        return None
    found = locate(exp.run.resume, "run.resume")
    folder = found.directory.parent
    stored = read_experiment(folder)
    if stored is None:
        return Parent(str(folder), None, found.step, [], {})
    changes = compare(Experiment, stored["config"], exp.model_dump(mode="json"))
    refuse(folder, changes, branching=True)
    changes = [change for change in changes if change.key not in _OWN]
    return Parent(os.fspath(folder), stored["run_id"], found.step, changes, stored["claimed"])


def _run_folder(place: str) -> str:
    """One way to write a run's folder, whether its checkpoints or itself is named."""
    folder = place.rstrip("/").removesuffix(f"/{CHECKPOINTS}")
    return folder if "://" in folder else os.path.realpath(folder)
