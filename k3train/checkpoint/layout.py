"""Where a run's checkpoints lie and which of them are complete. Imports no JAX.

RUN/checkpoints/100/                    one step: Orbax's files
RUN/checkpoints/100/manifest.json       written last; without it the folder is no checkpoint
RUN/checkpoints/200.orbax-checkpoint-tmp-*   a save that never ended
RUN/checkpoints/300.retired-1/          set aside by a resume from an older step
"""

import re
from collections.abc import Callable

from etils.epath import Path

from k3train.config.exit_codes import ExitCode
from k3train.config.storage import storage

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
_UNFINISHED = re.compile(r"\d+\.orbax-checkpoint-tmp.*")
_RETIRED = re.compile(r"\d+\.retired-\d+")


def ignore(_: str) -> None:
    """A note nobody wants to read."""


def step_folder(directory: Path, step: int) -> Path:
    """Folder of one step."""
    return directory / str(step)


def list_steps(directory: Path, note: Callable[[str], None] = ignore) -> list[int]:
    """Steps of the complete checkpoints, ascending, read from storage at every call.

    Args:
      directory: the ``checkpoints`` folder; may be absent.
      note: called with one line for each entry that is no checkpoint.

    Raises:
      UserError: the folder cannot be looked into (exit 31).
    """
    steps = []
    with storage(directory, "look for checkpoints", ExitCode.CHECKPOINT):
        entries = sorted(directory.iterdir()) if directory.is_dir() else ()
    for entry in entries:
        if not (entry.name.isascii() and entry.name.isdigit() and str(int(entry.name)) == entry.name):
            if not _RETIRED.fullmatch(entry.name):
                what = "a save that never ended" if _UNFINISHED.fullmatch(entry.name) else "not a checkpoint"
                note(f"ignored {entry}: {what}")
        elif (entry / MANIFEST).is_file():
            steps.append(int(entry.name))
        else:
            note(f"ignored {entry}: it has no {MANIFEST}, so its save never ended")
    return sorted(steps)


def clear_way(directory: Path, step: int, note: Callable[[str], None] = ignore) -> None:
    """Remove what broken-off saves left behind, so that ``step`` can be saved. Call it with no save under way.

    Only temporary folders of Orbax and what Orbax wrote under ``step`` itself without a manifest are removed: neither
    was ever a checkpoint.

    Raises:
      FileExistsError: the step is saved already, or its folder holds something that no save wrote.
    """
    for entry in directory.iterdir():
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir():
            note(f"removing {entry}: a save that never ended")
            entry.rmtree()
    folder = step_folder(directory, step)
    if (folder / MANIFEST).exists():
        raise FileExistsError(f"{folder} is a complete checkpoint already; a step is never saved twice")
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / "_CHECKPOINT_METADATA").exists():
        raise FileExistsError(f"{folder} holds files that no checkpoint has; move them away to save step {step}")
    note(f"removing {folder}: a save that never ended")
    folder.rmtree()


def remove(directory: Path, step: int) -> None:
    """Delete one checkpoint. The manifest goes first: half-deleted, it is no checkpoint any more."""
    folder = step_folder(directory, step)
    (folder / MANIFEST).unlink()
    folder.rmtree()


def retire(directory: Path, after: int) -> list[Path]:
    """Set aside every checkpoint later than ``after`` by renaming it; returns the new places.

    A run that goes on from an older step writes those steps anew; the old ones are kept, but no resume finds them.
    """
    moved = []
    for step in list_steps(directory):
        if step > after:
            number = 1
            while (target := directory / f"{step}.retired-{number}").exists():
                number += 1
            moved.append(step_folder(directory, step).rename(target))
    return moved


def surplus(steps: list[int], keep: int, keep_every: int | None) -> list[int]:
    """Steps to delete: all but the ``keep`` newest and the multiples of ``keep_every``."""
    old = sorted(steps)[:-keep]
    return [step for step in old if not keep_every or step % keep_every]
