"""``status.json``: what the run does now, or how it ended. Imports no JAX.

state       running | ended
attempt, pid, host, time (of this record)
phase, phase_s, step    what is being done, for how long without progress, optimizer steps done
checkpoint  the newest verified checkpoint's step
seconds     seconds of this attempt by phase
goodput     share of the time since the first start that went into steps which still count (metrics/goodput.py)
last_exit   attempt, code, name, reason, step and time of the latest end; null before the first
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from k3train.config.storage import write_whole
from k3train.metrics.goodput import Attempt, goodput
from k3train.run.phases import Phases

STATUS = "status.json"


class Status:
    """Writes the file; from several threads, so that each write is whole and nothing follows the end.

    Args:
      folder: the run's.
      attempt: number of this attempt.
      phases: what is being done.
      earlier: the attempts before this one.
      last_exit: the latest end known.
    """

    def __init__(
        self, folder: Path, attempt: int, phases: Phases, earlier: list[Attempt], last_exit: dict[str, Any] | None
    ):
        self._path, self._attempt, self._phases = folder / STATUS, attempt, phases
        self._earlier, self._last_exit = earlier, last_exit
        self._lock, self._ended = threading.Lock(), False
        self._first = phases.step
        self._began = time.time() - sum(phases.look().seconds.values())
        self.checkpoint: Callable[[], int | None] = lambda: None
        """The newest verified checkpoint's step."""

    def goodput(self) -> dict[str, float]:
        """Seconds by use, and the goodput, from the first start until now."""
        look, now = self._phases.look(), time.time()
        return goodput([*self._earlier, Attempt(self._first, look.step, self._began, now, look.seconds)], now)

    def seconds(self) -> dict[str, float]:
        """Seconds of this attempt by phase."""
        return {phase: round(value, 3) for phase, value in self._phases.look().seconds.items()}

    def write(self) -> None:
        """Write the present state, unless the end has been written."""
        with self._lock:
            if not self._ended:
                self._write("running")

    def end(self, last_exit: dict[str, Any]) -> None:
        """Write the end; the last thing that is written."""
        with self._lock:
            self._ended, self._last_exit = True, last_exit
            self._write("ended")

    def _write(self, state: str) -> None:
        look = self._phases.look()
        content = {
            "state": state,
            "attempt": self._attempt,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.time(),
            "phase": look.phase,
            "phase_s": round(look.age, 1),
            "step": look.step,
            "checkpoint": self.checkpoint(),
            "seconds": self.seconds(),
            "goodput": {name: round(value, 4) for name, value in self.goodput().items()},
            "last_exit": self._last_exit,
        }
        write_whole(self._path, json.dumps(content, indent=1) + "\n")


def read_status(folder: Path) -> dict[str, Any] | None:
    """The content of a run folder's status.json; None where there is none that can be read."""
    try:
        content = json.loads((Path(folder) / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "state" in content else None


def lost_line(status: dict[str, Any] | None, attempt: int) -> dict[str, Any]:
    """The line of attempts.jsonl for an attempt that left no end, as far as status.json knows it."""
    line: dict[str, Any] = {"event": "lost", "attempt": attempt}
    if status is not None and status.get("attempt") == attempt:
        line |= {key: status.get(key) for key in ("time", "phase", "step", "seconds")}
    return line
