"""The other processes of the run: signs of life, stop requests, and which of them died first.

Every process writes a beat into the coordination service once a second; process 0 judges who has gone silent, or, on
its own host, whose process is gone. What has failed first is written once, and every process leaves when it reads it.
"""

import ctypes
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from k3train.run.phases import Phases

BEAT_S = 1.0
"""Seconds between two signs of life."""
Failure = dict[str, Any]
"""What ended the run: process, host, pid, step, phase, reason, code (None: died without a word), time."""
_POLL = 0.1
_LEAVING_S = 8.0  # process 0 carries the coordination service, so it waits this long for the others to leave


class Notes(Protocol):
    """What is asked of ``parallel/coordination.Notes``."""

    def set(self, key: str, value: str, once: bool = False) -> bool:
        """Write a text; whether it was."""
        ...

    def get(self, key: str) -> str | None:
        """Read one."""
        ...

    def stop_notice(self) -> bool:
        """Whether any process got SIGTERM."""
        ...

    def below(self, folder: str) -> dict[str, str]:
        """All of a folder."""
        ...


class PeerWatch:
    """This process among the others of the run.

    Args:
      notes: texts shared by all.
      process, count: this process's number, and how many there are.
      timeout_s: seconds of silence after which a process counts as dead.
      phases: what this process is doing.
    """

    def __init__(self, notes: Notes, process: int, count: int, timeout_s: float, phases: Phases):
        self._notes, self.process, self.count = notes, process, count
        self._timeout_s, self._phases = timeout_s, phases
        self._number = 0
        self._done = False
        now = time.monotonic()
        self._heard: dict[int, tuple[dict[str, Any], float]] = {i: ({}, now) for i in range(count)}
        self._visible: set[int] = set()
        self.on_failure: Callable[[Failure], None] = lambda failure: None
        """Hears what ended the run, from the beating thread."""
        self.on_stop: Callable[[str], None] = lambda name: None
        """Hears the signal that some process got, from the beating thread."""

    # Stop requests

    def forward(self, name: str) -> None:
        """Turn a signal that only this process heard into the one that the runtime agrees about."""
        with suppress(Exception):  # without its service the run is about to end anyway
            self._notes.set("stop", name, once=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def stop_name(self) -> str:
        """The signal that asked the run to stop; SIGTERM where no other was noted."""
        return self._notes.get("stop") or "SIGTERM"

    def ready(self, watch: Callable[[], None]) -> bool:
        """Wait for all processes to be ready for the first step; whether there is to be one.

        The first word counts: process 0's go, when all are ready, or any process's stop (``refuse``).
        """
        self._notes.set(f"ready/{self.process}", "")
        while True:
            word = self._notes.get("start")
            if word is not None:
                return word == "go"
            if self.process == 0 and len(self._notes.below("ready")) == self.count:
                self._notes.set("start", "go", once=True)
                continue
            watch()
            time.sleep(_POLL)

    def refuse(self) -> bool:
        """Say that the run stops before its first step; whether that came in time."""
        self._notes.set("start", "stop", once=True)
        return self._notes.get("start") == "stop"

    def folder_is_open(self) -> None:
        """Process 0: the run folder is ours. The others wait for that, and leave if it is not."""
        if self.process == 0:
            self._notes.set("folder", "open")
        while self._notes.get("folder") is None:
            time.sleep(_POLL)

    # Signs of life

    def beat(self) -> None:
        """One sign of life, and a look at what the others say."""
        if self._done:
            return
        self._number += 1
        self._notes.set(f"beat/{self.process}", json.dumps(self._sign()))
        # Who got the signal may be gone before the runtime has told anybody of it.
        if self._notes.stop_notice() or self._notes.get("stop"):
            self.on_stop(self.stop_name())
        failed = self._notes.get("failed")
        if failed is not None:
            self.on_failure(json.loads(failed))
        elif self.process == 0:
            self._judge({int(i): json.loads(text) for i, text in self._notes.below("beat").items()})
        else:
            self._heard[0] = (json.loads(self._notes.get("beat/0") or "{}"), time.monotonic())

    def _sign(self) -> dict[str, Any]:
        now = self._phases.look()
        sign = {"number": self._number, "host": socket.gethostname(), "pid": os.getpid(), "born": born(os.getpid())}
        return sign | {"phase": now.phase, "phase_s": round(now.age, 1), "step": now.step, "done": self._done}

    def _judge(self, beats: dict[int, dict[str, Any]]) -> None:
        """Process 0: hear the beats; the first that is missing ends the run."""
        now, here = time.monotonic(), socket.gethostname()
        for i in range(self.count):
            beat, (last, when) = beats.get(i, {}), self._heard[i]
            if beat.get("number") != last.get("number"):
                self._heard[i] = (last, when) = (beat, now)
                if beat["host"] == here and born(beat["pid"]) == beat["born"]:
                    self._visible.add(i)
            if i == self.process or last.get("done"):
                continue
            gone = i in self._visible and born(last["pid"]) != last["born"]
            if gone and json.loads(self._notes.get(f"beat/{i}") or "{}").get("done"):
                continue  # it said good-bye since the beats were read
            if gone or now - when > self._timeout_s:
                reason = "it is gone (killed or crashed)" if gone else f"no sign of life for {now - when:.0f} s"
                self.fail(self._death(i, reason))
                return

    def _death(self, process: int, reason: str) -> Failure:
        """The record of a process that died without a word, from its last beat."""
        last = self._heard[process][0]
        known = {key: last.get(key) for key in ("host", "pid", "step", "phase")}
        return {"process": process, **known, "reason": reason, "code": None, "time": time.time()}

    def own_failure(self, code: int, reason: str) -> Failure:
        """The record of this process's end."""
        sign = self._sign()
        known = {key: sign[key] for key in ("host", "pid", "step", "phase")}
        return {"process": self.process, **known, "reason": reason, "code": code, "time": time.time()}

    def fail(self, failure: Failure) -> Failure:
        """Say what ends the run; returns what did, where another process was first."""
        try:
            if not self._notes.set("failed", json.dumps(failure), once=True):
                failure = json.loads(self._notes.get("failed") or "null") or failure
        except Exception:  # the service went with process 0, or goes with this one
            return failure
        self.on_failure(failure)
        return failure

    def coordinator_death(self) -> Failure:
        """The record of process 0's death, which takes the coordination service with it."""
        return self._death(0, "it is gone, and with it the coordination service")

    def finish(self) -> None:
        """Say that this process ends as planned."""
        self._done = True
        with suppress(Exception):
            self._notes.set(f"beat/{self.process}", json.dumps(self._sign()))

    def part(self) -> None:
        """Leave in the right order: process 0, which carries the service, last."""
        self.finish()
        with suppress(Exception):
            self._notes.set(f"left/{self.process}", "")
            until = time.monotonic() + _LEAVING_S
            while self.process == 0 and time.monotonic() < until and len(self._notes.below("left")) < self._present():
                time.sleep(_POLL)

    def _present(self) -> int:
        """How many processes are still there to leave: all but the one that died."""
        failed = json.loads(self._notes.get("failed") or "{}")
        return self.count - (1 if failed.get("code", 0) is None else 0)


def born(pid: int) -> int | None:
    """Start time of a live process of this host in clock ticks since boot; None where there is none (or no /proc)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_kept: list[Any] = []  # C keeps the address only


def last_words(function: Callable[[], None]) -> None:
    """Call ``function`` when the C runtime aborts the process, as JAX does when process 0 dies.

    Python's own handler would be too late: the process is gone before the interpreter looks at it.
    """

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def aborting(number: int) -> None:
        with suppress(Exception):
            function()

    _kept.append(aborting)
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGABRT), ctypes.cast(aborting, ctypes.c_void_p))


def reachable(address: str, timeout_s: float = 2.0) -> bool:
    """Whether something listens at ``host:port``."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError:
        return False
    return True
