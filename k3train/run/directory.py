"""The run folder: whose it is, who uses it now, and the record of every attempt. Imports no JAX.

run.lock         held by the trainer; names it
experiment.json  run id, the config it began with, its fingerprint, and the run it branched off from
config.yaml      the resolved config of the latest attempt that began
attempts.jsonl   a line at each start and each end
events.jsonl     branches and changes of the config, by step
status.json      run/status.py
metrics.jsonl    metrics/writers/jsonl.py
checkpoints/     checkpoint/layout.py
lock/            run/lease.py; in an object store, where the small files above are put from a mirror (run/mirror.py)
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from etils.epath import Path as AnyPath

from k3train.checkpoint.files import names_in, place
from k3train.checkpoint.layout import FOLDER as CHECKPOINTS
from k3train.config.drift import Change, compare, derived, guarded
from k3train.config.dump import dump_config
from k3train.config.errors import UserError
from k3train.config.exit_codes import INTERRUPTED, ExitCode
from k3train.config.fingerprint import fingerprint
from k3train.config.object_store import in_object_store
from k3train.config.section import Drift
from k3train.config.storage import storage, write_whole
from k3train.experiment import Experiment
from k3train.metrics.goodput import attempts_of
from k3train.run.attempts import ATTEMPTS, read_attempts
from k3train.run.identity import Parent, refuse
from k3train.run.lock import RunLock
from k3train.run.phases import Phases
from k3train.run.remote import RemoteFolder
from k3train.run.status import Status, lost_line, read_status

LOCK, EXPERIMENT, CONFIG = "run.lock", "experiment.json", "config.yaml"
EVENTS, METRICS = "events.jsonl", "metrics.jsonl"
# Facts of an attempt's surroundings that its numbers may depend on.
_DERIVED = ("versions", "git_commit", "xla_flags", "devices", "processes")
_GO_ON = (
    "bring it back from a copy. Without one, remove what is left of it and go on in another run.dir, with run.resume: "
    "PATH@STEP for a checkpoint of this folder"
)
_PROBE_BYTES = 1 << 20


class RunDirectory:
    """A run's folder, opened for training.

    Args:
      path: ``run.dir``, on a disk or in an object store; made where absent.
      config: the resolved config (``Experiment.model_dump(mode="json")``).
      main: whether this is process 0, the only one that locks and writes the run's records.
      process: this process's number.
      mirror: ``run.mirror``.
      parent: the run whose state a new folder begins with.

    Raises:
      UserError: exit 33, nothing touched: the folder holds another experiment (``DriftRefused``) or foreign files,
        another trainer uses it, or it cannot be written to.
    """

    def __init__(
        self,
        path: Path | str,
        config: Mapping[str, Any],
        *,
        main: bool = True,
        process: int = 0,
        mirror: str | None = None,
        parent: Parent | None = None,
    ):
        self._remote = RemoteFolder(str(path), mirror, process) if in_object_store(path) else None
        self.path = self._remote.path if self._remote else Path(path).expanduser().absolute()
        """Where files are written: the folder itself, or its mirror."""
        self.address: Path | str = self._remote.address if self._remote else self.path
        """Where the run is."""
        self.attempt = 0
        """Number of the present attempt, from 1; 0 before ``begin_attempt``."""
        self.changes: list[Change] = []
        """Keys that differ from the latest attempt's, or from the parent's where this folder is new."""
        self.status: Status | None = None
        """status.json, from ``begin_attempt`` on; process 0 only."""
        self._lock: RunLock | None = None
        self._config, self._parent = config, parent
        try:
            self._open(main)
        except BaseException:
            self.close()
            raise

    def _open(self, main: bool) -> None:
        """Take what is ours; make the folder what it is to be."""
        if main and self._remote is None:
            _refuse_foreign(self.path)
            with storage(self.path, "make the run folder"):
                self.path.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(self.path / LOCK)
            self._settle()
        elif self._remote is not None and main:
            _refuse_names(self.address, self._remote.names())
            self._lock = self._remote.open(LOCK)
            self._settle()
            self._remote.push()
            self._remote.begin()
        elif self._remote is not None:
            self._remote.begin_beside()

    def _settle(self) -> None:
        """Under the lock: compare or write what the folder stands for, then the config."""
        stored = read_experiment(self.path)
        if stored is None and has_checkpoints(self.address):  # a new id would make them another run's
            raise UserError(f"{self.address} holds checkpoints but no {EXPERIMENT}; {_GO_ON}", ExitCode.RUN_FOLDER)
        self.run_id = stored["run_id"] if stored else secrets.token_hex(6)
        if stored is not None and self._trained():
            first = compare(Experiment, stored["config"], self._config)
            refuse(self.address, first)
            probe(self.path)
            fixed = [change for change in first if change.drift != Drift.FREE]
            latest = compare(Experiment, self._stored_config(), self._config)
            self.changes = [*fixed, *(change for change in latest if change.drift == Drift.FREE)]
        else:
            # Nothing was learned here yet, so nothing is lost when the experiment is another one now.
            probe(self.path)
            if self._parent is not None:
                self.changes = self._parent.changes
            claimed = self._parent.claimed if self._parent else {}
            self._write_experiment({"created": time.time(), "parent": _record(self._parent)}, claimed)
            self._write_config()

    def _write_config(self) -> None:
        write_whole(self.path / CONFIG, dump_config(self._config))

    def _stored_config(self) -> dict[str, Any]:
        try:
            stored = yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            stored = None
        return stored if isinstance(stored, dict) else json.loads(json.dumps(self._config))

    def _write_experiment(self, stored: Mapping[str, Any], claimed: Mapping[str, Any]) -> None:
        """Write experiment.json anew with what the trainer claimed."""
        config = stored.get("config", self._config)
        content = {
            "run_id": self.run_id,
            "created": stored["created"],
            "fingerprint": fingerprint({**guarded(Experiment, config), **claimed}),
            "claimed": dict(claimed),
            "parent": stored["parent"],
            "config": config,
        }
        write_whole(self.path / EXPERIMENT, json.dumps(content, indent=1) + "\n")

    def claim(self, key: str, value: Any) -> None:
        """Add a fact that only the trainer learns to the identity, such as ``claim(STORE_KEY, content_hash)``.

        Raises:
          DriftRefused: the folder was claimed with another value (exit 33).
        """
        if self._lock is None:
            return
        stored = read_experiment(self.path)
        if stored is None:
            raise UserError(f"{self.address}/{EXPERIMENT} has vanished", ExitCode.RUN_FOLDER)
        old = stored["claimed"]
        if key not in old:
            self._write_experiment(stored, {**old, key: value})
        elif old[key] != value:
            refuse(self.address, [Change(key, old[key], value, Drift.FROZEN)])

    # Attempts

    @property
    def checkpoints(self) -> AnyPath:
        """The folder of the checkpoints; never in a mirror."""
        return place(self.address) / CHECKPOINTS

    def _trained(self) -> bool:
        """Whether the folder holds anything that a training made."""
        metrics = self.path / METRICS
        return has_checkpoints(self.address) or (metrics.is_file() and metrics.stat().st_size > 0)

    def push(self) -> None:
        """Put the records into the object store, where the run is in one: before a checkpoint counts.

        Raises:
          UserError: the store refuses, or another trainer has taken the folder (exit 33).
        """
        if self._remote is not None and self._lock is not None:
            self._remote.push()

    def surroundings(self, facts: Mapping[str, Any]) -> list[Change]:
        """What of an attempt's surroundings (``facts`` of run/environment.py) differs from the attempt before."""
        starts = [line for line in read_attempts(self.path) if line["event"] == "start"] if self._lock else []
        before = starts[-1] if starts else {}
        names = [name for name in _DERIVED if name in before and name in facts]
        return derived({name: before[name] for name in names}, {name: facts[name] for name in names})

    def begin_attempt(
        self, facts: Mapping[str, Any], resumed_step: int | None = None, phases: Phases | None = None
    ) -> int:
        """Record a start: ``facts`` of run/environment.py, the step resumed from, the attempt's clock.

        Returns the attempt's number.
        """
        if self._lock is None:
            return 0
        phases = phases or Phases()
        phases.step = resumed_step or 0
        earlier, before_status = read_attempts(self.path), read_status(self.path)
        starts = [line for line in earlier if line["event"] == "start"]
        self.attempt = len(starts) + 1
        own = [line for line in earlier if line["event"] in ("start", "end", "lost")]
        previous_ended = own[-1]["event"] == "end" if own else None
        if own and own[-1]["event"] == "start":
            earlier.append(lost_line(before_status, self.attempt - 1))
            self._append(ATTEMPTS, earlier[-1])
        self.changes = [*self.changes, *self.surroundings(facts)]
        line = {
            "event": "start",
            "attempt": self.attempt,
            "began": time.time() - sum(phases.look().seconds.values()),
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "resumed_step": resumed_step,
            "previous_ended": previous_ended,
            "changes": _plain_changes(self.changes),
            **facts,
        }
        self._append(ATTEMPTS, line)
        # Only now: a start that was refused (its devices, its data) must not pass for the config of the run.
        self._write_config()
        if self._parent is not None:
            self.event("branch", self._parent.step, parent=_record(self._parent))
        elif self.changes:
            self.event("config", resumed_step or 0, changes=_plain_changes(self.changes))
        last_exit = (before_status or {}).get("last_exit")
        self.status = Status(self.path, self.attempt, phases, attempts_of(earlier), last_exit)
        self.status.write()
        return self.attempt

    def end_attempt(self, code: int, reason: str, step: int | None = None) -> None:
        """Record the end in attempts.jsonl and status.json: exit code, its name, the reason in words, the last step."""
        if self._lock is None:
            return
        names = {**{int(known): known.name.lower() for known in ExitCode}, INTERRUPTED: "interrupted"}
        end = {
            "attempt": self.attempt,
            "time": time.time(),
            "code": int(code),
            "name": names.get(int(code), "unknown"),
            "reason": reason,
        }
        end["step"] = step
        event, status = "end", self.status
        if status is None:  # it never came to an attempt: data or a checkpoint were refused
            earlier = read_attempts(self.path)
            event, end["attempt"] = "refused", len([line for line in earlier if line["event"] == "start"])
            status = Status(self.path, end["attempt"], Phases(), attempts_of(earlier), None)
        # status.json first: it is what requeue logic reads.
        status.end(end)
        self._append(ATTEMPTS, {"event": event, **end, "seconds": status.seconds()})
        if self._remote is not None:
            self._remote.finish()

    def event(self, name: str, step: int, **content: Any) -> None:
        """Write down in events.jsonl what happened to the run after ``step``."""
        if self._lock is not None:
            line = {"event": name, "step": step, "attempt": self.attempt, "time": time.time(), **content}
            self._append(EVENTS, line)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path / name
        with storage(path, "write"), path.open("ab+") as file:
            # A line torn by a crash is closed off, so that it spoils no other.
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Push what is left, release the lock."""
        if self._remote is not None:
            self._remote.finish()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def has_checkpoints(path: Path | str) -> bool:
    """Whether anything lies in the run folder's checkpoints, damaged or not."""
    folder = place(path) / CHECKPOINTS
    with storage(path, "look for checkpoints"):
        if not in_object_store(path) and folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; move it away, or choose another run.dir", ExitCode.RUN_FOLDER)
        return bool(names_in(folder))


def _plain_changes(changes: Sequence[Change]) -> dict[str, list]:
    """``{key: [was, now, class]}``."""
    return {change.key: [change.was, change.now, change.drift] for change in changes}


def _record(parent: Parent | None) -> dict[str, Any] | None:
    """A parent as experiment.json and events.jsonl keep it."""
    return parent and {**parent._asdict(), "changes": _plain_changes(parent.changes)}


def read_experiment(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The folder's experiment.json; None where there is none.

    Raises:
      UserError: it cannot be read (exit 33).
    """
    file = place(path) / EXPERIMENT
    try:
        content = json.loads(file.read_text())
        kinds = {"run_id": str, "config": dict, "claimed": dict, "created": int | float, "parent": dict | None}
        if not all(key in content and isinstance(content[key], kind) for key, kind in kinds.items()):
            raise ValueError("it is not the record of an experiment")
        return content
    except FileNotFoundError:
        return None
    except Exception as error:
        if not (in_object_store(path) or isinstance(error, OSError | ValueError | TypeError)):
            raise
        raise UserError(f"{file} cannot be read ({error}); {_GO_ON}", ExitCode.RUN_FOLDER) from error


def probe(path: Path, size: int = _PROBE_BYTES) -> None:
    """Write and remove a small file, so that a full disk is found before training.

    Raises:
      UserError: storage refuses (exit 33).
    """
    file = path / f".probe.{os.getpid()}"
    with storage(path, "write to the run folder"):
        try:
            with file.open("wb") as out:
                out.write(bytes(size))
                out.flush()
                os.fsync(out.fileno())
        finally:
            file.unlink(missing_ok=True)


def _refuse_foreign(path: Path) -> None:
    """Refuse what is no run folder: a file, or a folder with content that no run wrote. Touches nothing."""
    with storage(path, "look into the run folder"):
        if not path.exists():
            return
        if not path.is_dir():
            raise UserError(f"{path} is a file; run.dir must name a folder", ExitCode.RUN_FOLDER)
        names = sorted(entry.name for entry in path.iterdir())
    _refuse_names(path, names)


def _refuse_names(path: Path | str, names: list[str]) -> None:
    """Refuse a folder by the names of what lies in it."""
    # A run that died between taking the lock and writing experiment.json leaves only these.
    others = [name for name in names if name != LOCK and not name.startswith((".probe.", f".{EXPERIMENT}."))]
    if others and EXPERIMENT not in names:
        some = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UserError(
            f"{path} is not empty and not a run folder (it holds {some}); nothing was touched. "
            "Choose another run.dir, or an empty folder.",
            ExitCode.RUN_FOLDER,
        )
