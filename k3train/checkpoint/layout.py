"""Where a run's checkpoints lie, and what each folder is. Markers alone decide; nothing is renamed. Imports no JAX.

RUN/checkpoints/100/                    one step: Orbax's files
RUN/checkpoints/100/manifest.json       written last; without it the folder is no checkpoint
RUN/checkpoints/100/quarantined.json    it failed verification: never loaded, never deleted unasked
RUN/checkpoints/100/retired.json        set aside by a resume from an older step
RUN/checkpoints/100/keep.json           named by the user: stays for good
RUN/checkpoints/100-2/                  the step again, where 100 was taken by a folder set aside
RUN/checkpoints/100.saving.json         a save of folder 100 began and has not ended
"""

import json
import re
import time
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from etils.epath import Path

from k3train.checkpoint.files import names_in, put
from k3train.checkpoint.manifest import KEEP, MANIFEST, QUARANTINED, RETIRED, Note, ignore, read_manifest
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import in_object_store
from k3train.config.storage import storage

FOLDER = "checkpoints"
Status = Literal["complete", "quarantined", "retired", "damaged", "unfinished", "foreign"]
_NAME = re.compile(r"(0|[1-9]\d*)(?:-([2-9]|[1-9]\d+))?")
_UNFINISHED = re.compile(r"(\d+(?:-\d+)?)\.orbax-checkpoint-tmp.*")
_SAVING = re.compile(r"(\d+(?:-\d+)?)\.saving\.json")


class Entry(NamedTuple):
    """One folder that is named like a step."""

    step: int
    number: int
    """1 for ``100``, 2 for ``100-2``."""
    path: Path
    status: Status
    """``complete``: a checkpoint. ``damaged``: its manifest is. ``unfinished``: a save that never ended. ``foreign``:
    no save wrote it, or another run's did."""
    reason: str
    """Why it is no checkpoint; empty where it is one."""
    manifest: dict[str, Any]
    """Empty where it cannot be read."""
    kept: bool
    """The user named it with ``k3train ckpt keep``."""


def scan(directory: Path, run_id: str | None = None, note: Note = ignore) -> list[Entry]:
    """Every folder named like a step, by step and number, read from storage at every call.

    Args:
      directory: the ``checkpoints`` folder; may be absent.
      run_id: the run whose checkpoints are wanted; those of others are foreign. None takes any.
      note: called with one line for each entry that is neither a step's folder nor a trace of a save.

    Raises:
      UserError: the folder cannot be looked into (exit 31).
    """
    with storage(directory, "look for checkpoints", ExitCode.CHECKPOINT):
        names = names_in(directory)
    saving = {match[1] for name in names if (match := _SAVING.fullmatch(name))}
    entries = []
    for name in names:
        if match := _NAME.fullmatch(name):
            entries.append(_entry(directory / name, int(match[1]), int(match[2] or 1), name in saving, run_id))
        elif not _SAVING.fullmatch(name):
            what = "a save that never ended" if _UNFINISHED.fullmatch(name) else "not a checkpoint"
            note(f"ignored {directory / name}: {what}")
    return sorted(entries)


def _entry(path: Path, step: int, number: int, saving: bool, run_id: str | None) -> Entry:
    """Look into one folder."""
    inside = set(names_in(path))
    manifest: dict[str, Any] = {}
    status: Status = "complete"
    reason = ""
    if MANIFEST in inside:
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            status, reason = "damaged", str(error)
        else:
            owner = manifest["meta"].get("run_id")
            if manifest["step"] != step:
                status, reason = "foreign", f"it holds step {manifest['step']}"
            elif None not in (run_id, owner) and owner != run_id:
                status, reason = "foreign", f"it was saved by another run ({owner})"
    elif saving or not inside:
        status, reason = "unfinished", f"it has no {MANIFEST}, so its save never ended"
    else:
        status, reason = "foreign", f"it has no {MANIFEST}"
    if status != "foreign":
        if QUARANTINED in inside:
            status, reason = "quarantined", _reason(path / QUARANTINED)
        elif RETIRED in inside:
            status, reason = "retired", _reason(path / RETIRED)
    return Entry(step, number, path, status, reason, manifest, KEEP in inside)


def _reason(marker: Path) -> str:
    try:
        return str(json.loads(marker.read_text())["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return f"{marker.name} cannot be read"


def complete(entries: list[Entry]) -> dict[int, Entry]:
    """The checkpoints by step, ascending; of several folders of a step the newest."""
    return {entry.step: entry for entry in entries if entry.status == "complete"}


def list_steps(directory: Path, note: Note = ignore) -> list[int]:
    """Steps of the checkpoints, ascending, read from storage at every call; ``note`` hears about what is none."""
    entries = scan(directory, note=note)
    for entry in entries:
        if entry.status != "complete":
            note(f"ignored {entry.path}: {entry.status}: {entry.reason}")
    return list(complete(entries))


def mark(path: Path, marker: str, reason: str) -> None:
    """Put a marker into a step's folder, with the reason and the time."""
    put(path / marker, json.dumps({"reason": reason, "time": time.time()}) + "\n")


def begin_save(
    directory: Path, step: int, busy: set[str] | None = None, run_id: str | None = None, note: Note = ignore
) -> Path:
    """Remove what broken-off saves left behind, and claim a folder for ``step``. Call it with no save under way.

    Removed are temporary folders of Orbax, and folders without a manifest whose save left its ``.saving.json``.

    Args:
      directory: the ``checkpoints`` folder; made where absent.
      step: optimizer steps done.
      busy: names of folders that saves of this process are writing, be it saves given up on; they are left alone, and
        the name chosen is added.
      run_id: the run that saves; what others saved is left alone too.
      note: hears about what is removed.

    Raises:
      FileExistsError: the step is saved already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    busy = set() if busy is None else busy
    entries = scan(directory, run_id)
    clear(directory, entries, busy, note)
    gone = [entry for entry in entries if entry.status == "unfinished" and entry.path.name not in busy]
    of_step = [entry for entry in entries if entry.step == step and (entry not in gone or in_object_store(directory))]
    if there := complete(of_step).get(step):
        raise FileExistsError(f"{there.path} is a complete checkpoint already; a step is never saved twice")
    taken = {entry.path.name for entry in of_step} | set(busy)
    number = 1
    while (name := f"{step}-{number}" if number > 1 else str(step)) in taken:
        number += 1
    busy.add(name)
    put(directory / f"{name}.saving.json", json.dumps({"step": step, "time": time.time()}) + "\n")
    return directory / name


def end_save(path: Path) -> None:
    """Take the claim back: the folder has its manifest."""
    (path.parent / f"{path.name}.saving.json").unlink(missing_ok=True)


def clear(directory: Path, entries: list[Entry], busy: Collection[str], note: Note) -> None:
    """Remove what broken-off saves left behind, but what ``busy`` names."""
    for entry in entries:
        if entry.status == "unfinished" and entry.path.name not in busy:
            note(f"removing {entry.path}: a save that never ended")
            entry.path.rmtree(missing_ok=True)
    for path in [directory / name for name in names_in(directory)]:
        if (match := _UNFINISHED.fullmatch(path.name)) and match[1] not in busy:
            note(f"removing {path}: a save that never ended")
            path.rmtree(missing_ok=True)
        elif (match := _SAVING.fullmatch(path.name)) and match[1] not in busy:
            path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete one checkpoint. The manifest goes first, under a claim: half-deleted, it is a save that never ended."""
    claim = path.parent / f"{path.name}.saving.json"
    with suppress(UserError, OSError):  # a full disk must not keep anything from being deleted
        put(claim, json.dumps({"deleting": path.name, "time": time.time()}) + "\n")
    (path / MANIFEST).unlink(missing_ok=True)
    path.rmtree(missing_ok=True)
    claim.unlink(missing_ok=True)


def retire(directory: Path, after: int, run_id: str | None = None) -> list[Path]:
    """Mark every checkpoint of the run later than ``after`` as set aside; returns their folders.

    A run that goes on from an older step writes those steps anew; the old ones are kept, but no resume finds them.
    """
    later = [entry for entry in scan(directory, run_id) if entry.status == "complete" and entry.step > after]
    for entry in later:
        mark(entry.path, RETIRED, f"the run went on from step {after}")
    return [entry.path for entry in later]
