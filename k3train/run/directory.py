"""The run folder: whose it is, who uses it now, and the record of every attempt. Imports no JAX.

run.lock         held by the trainer; names it
experiment.json  run id, identity (run/identity.py) and its fingerprint
config.yaml      the resolved config of the latest attempt
attempts.jsonl   a line at each start and each end
exit.json        how the latest attempt ended, or that it runs
metrics.jsonl    metrics/writers/jsonl.py
checkpoints/     checkpoint/layout.py
"""

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from k3train.checkpoint.layout import FOLDER as CHECKPOINTS
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.fingerprint import fingerprint
from k3train.config.storage import storage, write_whole
from k3train.config.yaml_reader import scalar
from k3train.run.identity import changed, flatten, identity, refuse_changed
from k3train.run.lock import RunLock

LOCK, EXPERIMENT, CONFIG, ATTEMPTS, EXIT = "run.lock", "experiment.json", "config.yaml", "attempts.jsonl", "exit.json"
_PROBE_BYTES = 1 << 20


class RunDirectory:
    """A run's folder, opened for training.

    Args:
      path: ``run.dir``; made where absent.
      config: the resolved config (``Experiment.model_dump(mode="json")``).
      main: whether this is process 0, the only one that locks and writes.

    Raises:
      UserError: exit 33, nothing touched: the folder holds another experiment or foreign files, another trainer uses
        it, or it cannot be written to.
    """

    def __init__(self, path: Path | str, config: Mapping[str, Any], *, main: bool = True):
        self.path = Path(path).expanduser().absolute()
        self.attempt = 0
        """Number of the present attempt, from 1; 0 before ``begin_attempt``."""
        self.config_changes: dict[str, list] = {}
        """Keys outside the identity whose values differ from the latest attempt's: ``{key: [old, new]}``."""
        self._lock: RunLock | None = None
        self._config = config
        self._identity = identity(config)
        if not main:
            return
        _refuse_foreign(self.path)
        with storage(self.path, "make the run folder"):
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.path / LOCK)
        try:
            self._settle()
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """Under the lock: compare or write the identity, then the config."""
        stored = read_experiment(self.path)
        if stored is None:
            probe(self.path)
            self.run_id = secrets.token_hex(6)
            self._write_experiment()
        else:
            self.run_id = stored["run_id"]
            # What the trainer claims later (the store's hash) is not known yet.
            known = {key: value for key, value in stored["identity"].items() if key not in stored["claimed"]}
            refuse_changed(self.path, known, self._identity)
            probe(self.path)
            self.config_changes = changed(flatten(self._stored_config()), flatten(self._config))
        write_whole(self.path / CONFIG, dump_config(self._config))

    def _stored_config(self) -> dict[str, Any]:
        try:
            stored = yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            stored = None
        return stored if isinstance(stored, dict) else json.loads(json.dumps(self._config))

    def _write_experiment(self, claimed: Mapping[str, Any] | None = None, created: float | None = None) -> None:
        whole = {**self._identity, **(claimed or {})}
        content = {
            "run_id": self.run_id,
            "created": created or time.time(),
            "fingerprint": fingerprint(whole),
            "claimed": sorted(claimed or {}),
            "identity": whole,
        }
        write_whole(self.path / EXPERIMENT, json.dumps(content, indent=1) + "\n")

    def claim(self, key: str, value: Any) -> None:
        """Add a fact that only the trainer learns to the identity, such as ``claim(STORE_KEY, content_hash)``.

        Raises:
          UserError: the folder was claimed with another value (exit 33).
        """
        if self._lock is None:
            return
        stored = read_experiment(self.path)
        if stored is None:
            raise UserError(f"{self.path / EXPERIMENT} has vanished", ExitCode.RUN_FOLDER)
        old = {name: stored["identity"][name] for name in stored["claimed"]}
        if key in old:
            refuse_changed(self.path, {key: old[key]}, {key: value})
        else:
            self._write_experiment({**old, key: value}, stored["created"])

    # Attempts

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / CHECKPOINTS

    def begin_attempt(self, facts: Mapping[str, Any], resumed_step: int | None = None) -> int:
        """Record a start: ``facts`` of run/environment.py, the step resumed from. Returns the attempt's number."""
        if self._lock is None:
            return 0
        earlier = read_attempts(self.path)
        starts = [line for line in earlier if line["event"] == "start"]
        self.attempt = len(starts) + 1
        line = {
            "event": "start",
            "attempt": self.attempt,
            "time": time.time(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "resumed_step": resumed_step,
            "previous_ended": earlier[-1]["event"] == "end" if earlier else None,
            "config_changes": self.config_changes,
            **facts,
        }
        self._append(line)
        running = {"attempt": self.attempt, "state": "running", "pid": os.getpid(), "host": socket.gethostname()}
        write_whole(self.path / EXIT, json.dumps(running) + "\n")
        return self.attempt

    def end_attempt(self, code: int, reason: str, step: int | None = None) -> None:
        """Record the end in attempts.jsonl and exit.json: exit code, its name, the reason in words, the last step."""
        if self._lock is None or not self.attempt:
            return
        name = ExitCode(code).name.lower() if code in list(ExitCode) else "unknown"
        end = {"attempt": self.attempt, "time": time.time(), "code": int(code), "name": name, "reason": reason}
        end["step"] = step
        # exit.json first: it is what requeue logic reads.
        write_whole(self.path / EXIT, json.dumps({"state": "ended", **end}) + "\n")
        self._append({"event": "end", **end})

    def _append(self, line: Mapping[str, Any]) -> None:
        path = self.path / ATTEMPTS
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
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer, but quoting all text that our YAML 1.2 reader would take for something else (``1e-4``)."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(scalar(text), str) else "'"
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def dump_config(config: Mapping[str, Any]) -> str:
    """A resolved config as YAML that ``config/yaml_reader.py`` reads back equal; innermost lists stay on one line."""
    plain = json.loads(json.dumps(config))
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def read_experiment(path: Path) -> dict[str, Any] | None:
    """The folder's experiment.json; None where there is none.

    Raises:
      UserError: it cannot be read (exit 33).
    """
    file = Path(path) / EXPERIMENT
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not content.keys() >= {"run_id", "identity", "claimed", "created"}:
            raise ValueError("it is not the record of an experiment")
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} cannot be read ({error}); choose another run.dir", ExitCode.RUN_FOLDER) from error


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The readable lines of attempts.jsonl, oldest first; torn ones are passed over."""
    file = Path(path) / ATTEMPTS
    lines = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "event" in line:
            lines.append(line)
    return lines


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
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file; run.dir must name a folder", ExitCode.RUN_FOLDER)
    with storage(path, "read the run folder"):
        names = sorted(entry.name for entry in path.iterdir())
    # A run that died between taking the lock and writing experiment.json leaves only these.
    others = [name for name in names if name != LOCK and not name.startswith((".probe.", f".{EXPERIMENT}."))]
    if others and EXPERIMENT not in names:
        some = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        raise UserError(
            f"{path} is not empty and not a run folder (it holds {some}); nothing was touched. "
            "Choose another run.dir, or an empty folder.",
            ExitCode.RUN_FOLDER,
        )
