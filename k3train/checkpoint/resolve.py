"""Which checkpoint a run begins with: ``run.resume`` and ``run.init_from`` read. Imports no JAX."""

from os import PathLike
from typing import NamedTuple

from etils.epath import Path

from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.layout import FOLDER, MANIFEST, list_steps
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode


class Found(NamedTuple):
    """One checkpoint."""

    directory: Path
    """The ``checkpoints`` folder."""
    step: int


def resolve_resume(resume: str, run_dir: str | PathLike[str]) -> Found | None:
    """The checkpoint that ``run.resume`` names; None starts anew.

    Args:
      resume: ``auto`` (newest of the run's own folder, if any), ``must`` (that, or an error), ``never`` (start anew,
        and refuse a folder that holds checkpoints, since nothing is ever deleted), or ``PATH@STEP`` / ``PATH@latest``.
      run_dir: the run's folder.

    Raises:
      UserError: exit 31 where the named checkpoint is not there, exit 33 for ``never`` on a folder with checkpoints.
    """
    own = Path(run_dir) / FOLDER
    if resume in ("auto", "must", "never"):
        steps = list_steps(own)
        if resume == "never" and steps:
            raise UserError(
                f"{run_dir}: run.resume is never, but the folder holds checkpoints (steps {_steps(steps)}); "
                "choose another run.dir, or run.resume: auto to go on from the newest",
                ExitCode.RUN_FOLDER,
            )
        if resume == "must" and not steps:
            raise CheckpointRefused(f"{own}: run.resume is must, but there is no checkpoint; auto would start anew")
        return Found(own, steps[-1]) if steps and resume != "never" else None
    if "@" not in resume:
        raise CheckpointRefused(f"run.resume: {resume!r} is none of auto, must, never, PATH@STEP and PATH@latest")
    return locate(resume, "run.resume")


def locate(text: str, key: str = "run.init_from") -> Found:
    """The checkpoint named by ``PATH``, ``PATH@STEP`` or ``PATH@latest``.

    PATH is a run folder, its ``checkpoints`` folder or (without @) the folder of one step; without @STEP the newest.

    Raises:
      CheckpointRefused: it is not there; the steps that are get listed.
    """
    place, at, step = text.rpartition("@")
    if at and Path(text).expanduser().is_dir():  # the @ is part of a folder's name
        place, at, step = text, "", ""
    path = Path(place if at else text).expanduser()
    if not path.is_dir():
        raise CheckpointRefused(f"{key}: {path} is not a folder")
    if not at and path.name.isdigit() and (path / MANIFEST).is_file():
        return Found(path.parent, int(path.name))
    directory = path / FOLDER if (path / FOLDER).is_dir() else path
    steps = list_steps(directory)
    if not steps:
        raise CheckpointRefused(f"{key}: {path} holds no complete checkpoint")
    if not at or step == "latest":
        return Found(directory, steps[-1])
    if not step.isdigit():
        raise CheckpointRefused(f"{key}: {step!r} after the @ is neither a step number nor latest")
    if int(step) not in steps:
        raise CheckpointRefused(f"{key}: {directory} has no checkpoint of step {step}; there: {_steps(steps)}")
    return Found(directory, int(step))


def _steps(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
