"""Which checkpoint a run begins with: ``run.resume`` and ``run.init_from`` read. Imports no JAX."""

from os import PathLike
from typing import NamedTuple

from etils.epath import Path

from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.layout import FOLDER, complete, list_steps, scan
from k3train.checkpoint.manifest import MANIFEST
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import make_ready
from k3train.config.storage import storage


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
      UserError: exit 31 where the named checkpoint is not there, or the folder holds checkpoints of which none is
        usable; exit 33 for ``never`` on a folder with checkpoints.
    """
    make_ready(run_dir)
    own = Path(run_dir) / FOLDER
    if resume in ("auto", "must", "never"):
        entries = [entry for entry in scan(own) if entry.status != "unfinished"]
        steps = list(complete(entries))
        if resume == "never" and entries:
            raise UserError(
                f"{run_dir}: run.resume is never, but the folder holds checkpoints (steps "
                f"{_steps(sorted({entry.step for entry in entries}))}); choose another run.dir, or run.resume: auto to "
                "go on from the newest",
                ExitCode.RUN_FOLDER,
            )
        if entries and not steps:
            # Starting anew here would bury what a repair might bring back.
            lines = "\n".join(f"  {entry.path}: {entry.status}: {entry.reason}" for entry in entries[-12:])
            raise CheckpointRefused(
                f"{own}: there are checkpoints, but none that can be used:\n{lines}\n"
                "Nothing was loaded and nothing deleted. Mend them, or move the run folder aside to start anew"
            )
        if resume == "must" and not steps:
            raise CheckpointRefused(f"{own}: run.resume is must, but there is no checkpoint; auto would start anew")
        return Found(own, steps[-1]) if steps else None
    if "@" not in resume:
        raise CheckpointRefused(f"run.resume: {resume!r} is none of auto, must, never, PATH@STEP and PATH@latest")
    return locate(resume, "run.resume")


def locate(text: str, key: str = "run.init_from") -> Found:
    """The checkpoint named by ``PATH``, ``PATH@STEP`` or ``PATH@latest``.

    PATH is a run folder, its ``checkpoints`` folder or (without @) the folder of one step; without @STEP the newest.

    Raises:
      CheckpointRefused: it is not there; the steps that are get listed.
    """
    make_ready(text)
    with storage(text, "look for a checkpoint", ExitCode.CHECKPOINT):
        return _locate(text, key)


def _locate(text: str, key: str) -> Found:
    place, at, step = text.rpartition("@")
    if at and Path(text).expanduser().is_dir():  # the @ is part of a folder's name
        place, at, step = text, "", ""
    path = Path(place if at else text).expanduser()
    if not path.is_dir():
        raise CheckpointRefused(f"{key}: {path} is not a folder")
    if not at and (path / MANIFEST).exists():
        entries = scan(path.parent)
        entry = next((entry for entry in entries if entry.path == path), None)
        if entry is None:
            raise CheckpointRefused(f"{key}: {path} is not named like a step")
        if complete(entries).get(entry.step) != entry:
            raise CheckpointRefused(f"{key}: {path} is no checkpoint: {entry.status}: {entry.reason}")
        return Found(path.parent, entry.step)
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
