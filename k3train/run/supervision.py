"""Everything that watches over a run beside its main thread, and the ways out.

The main thread trains and says what phase it is in. Beside it run: the listener for signals (run/signals.py), the
watchdog (run/watchdog.py), the writer of status.json and processes/<id>.json, and, with several processes, the beat
(run/peer_watch.py). What may take long and cannot be interrupted goes through ``aside``, so that a stop is answered in
it.
"""

import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from k3train.config.errors import UserError
from k3train.config.exit_codes import INTERRUPTED, ExitCode
from k3train.config.storage import write_whole
from k3train.run.aside import Aside, Every
from k3train.run.config import RunConfig
from k3train.run.directory import RunDirectory
from k3train.run.peer_watch import BEAT_S, Failure, Notes, PeerWatch, last_words, reachable
from k3train.run.phases import Phases, Snapshot
from k3train.run.signals import StopRequest, exit_code
from k3train.run.watchdog import Watchdog

STACKS, PROCESSES, FIRST_FAILURE = "stacks", "processes", "first_failure.json"
_PATIENCE_S = 5.0  # a stop that is pending for longer is answered wherever the process is
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): ")
_RECORD_S = 10.0  # for the last records: storage may be what is stuck
_AT_ONCE_S = 2.0  # the same, where a user waits for it
_STATUS_S, _PROCESS_S = 5.0, 15.0


class Stopped(Exception):
    """A stop was asked for and the run cannot, or need not, get to its next step first."""


class Supervision:
    """Watches over one attempt; a context manager of the main thread.

    Args:
      config: the run section.
      began: wall clock of the process's start.
      process, count: this process's number, and how many there are.
      notes: texts shared by all processes; None where there is one.
      coordinator: host:port of the service behind ``notes``.
      reached_stop: whether all processes stop at a tick (``parallel/distributed.py``).
    """

    def __init__(
        self,
        config: RunConfig,
        began: float,
        process: int = 0,
        count: int = 1,
        notes: Notes | None = None,
        coordinator: str = "",
        reached_stop: Callable[[int], bool] = lambda tick: False,
    ):
        self.phases = Phases(already=max(time.time() - began, 0.0))
        self.process, self._coordinator, self._reached_stop = process, coordinator, reached_stop
        self.peers = PeerWatch(notes, process, count, config.peer_timeout_s, self.phases) if notes else None
        self.stop = StopRequest(self.peers.forward if self.peers else None)
        self._watchdog = Watchdog(config.watchdog, self.phases, self._stacks_file, self.tell, self._stuck)
        self._aside = Aside()
        self._folder: RunDirectory | None = None
        self._threads: list[Every] = []
        self._tick, self._started = 0, False
        self._turned_back = False
        self.kept: Callable[[], bool] = lambda: False
        """Whether a good checkpoint holds the state that the run is in."""
        self._leaving = threading.Lock()
        self._began, self._patience_s = began, config.peer_timeout_s + 3 * BEAT_S

    # Beginning

    def __enter__(self) -> "Supervision":
        self.stop.at_once = partial(_within, _AT_ONCE_S, self._interrupted)
        self.stop.__enter__()
        self._watchdog.start()
        if self.peers is not None:
            self.peers.on_failure, self.peers.on_stop = self._peer_failed, self.stop.note
            last_words(self._aborting)
            self._every("beat", BEAT_S, self.peers.beat)
        return self

    def attach(self, folder: RunDirectory) -> None:
        """The run folder is open: write into it from now on."""
        if self.peers is not None:
            self.peers.folder_is_open()
        self._folder = folder
        with _quietly():
            self._write_process()  # a short run may be over before it is the thread's turn
        self._every("process record", _PROCESS_S, self._write_process)
        self._every("status", _STATUS_S, self._write_status)

    def _every(self, name: str, seconds: float, function: Callable[[], None]) -> None:
        thread = Every(name, seconds, function, self.tell)
        self._threads.append(thread)
        thread.start()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._watchdog.stop()
        for thread in self._threads:
            thread.stop()
        if self.peers is not None:
            self.peers.finish()
        self.stop.__exit__(kind, error, trace)

    # Asked by the loop

    def aside(self, function: Callable, *args: Any) -> Any:
        """``function(*args)`` in a thread of its own.

        Raises:
          Stopped: a stop was asked for and is to be answered before the call returns.
        """
        return self._aside(function, *args, watch=self._watch)

    @property
    def must_leave(self) -> bool:
        """Whether the process cannot end in the ordinary way, but only by ``leave``.

        A call that was given up still runs, or other processes were left in the middle of something common.
        """
        return self._aside.busy or (self._turned_back and self.peers is not None)

    def turned_back(self) -> None:
        """The run ends before its first step."""
        self._turned_back = True

    def _watch(self) -> None:
        """Whether what goes on aside must be given up."""
        if not self.stop:
            return
        if self.peers is None:
            raise Stopped
        if not self._started:
            if self.peers.refuse():
                raise Stopped
        elif self.stop.pending() > _PATIENCE_S:
            # The others wait in a collective for this process, so that no common step can be saved.
            code = exit_code(self.stop.name or "SIGTERM", self.kept())
            look = self.phases.look()
            failure = self.peers.own_failure(code, f"{self.stop.describe()} while in {look.phase}")
            self.peers.fail(failure | {"stopped": True})

    def ready(self) -> None:
        """Everything is compiled: begin at the same time as the others.

        Raises:
          Stopped: a stop was asked for before the first step.
        """
        if self.peers is None:
            if self.stop:
                raise Stopped
        elif not self.peers.ready(self._watch):
            self.stop.note(self.peers.stop_name())
            raise Stopped
        self._started = True

    def stops_here(self) -> bool:
        """Whether to stop now. Ask between steps and between batches of an evaluation, on every process alike.

        With several processes all get the same answers, at no cost of communication.
        """
        self.phases.got_on()
        if self.peers is None:
            return bool(self.stop)
        tick, self._tick = self._tick, self._tick + 1
        if not self._reached_stop(tick):
            return False
        self.stop.note(self.peers.stop_name())
        return True

    def stop_code(self, kept: bool) -> ExitCode:
        """The exit code of the stop that was asked for."""
        return exit_code(self.stop.name or "SIGTERM", kept, began=self.phases.step > 0)

    # Leaving

    def failed(self, error: BaseException) -> None:
        """The run ends by an error. With several processes this does not return: the others are told."""
        code = error.exit_code if isinstance(error, UserError) else ExitCode.BUG
        reason = f"{type(error).__name__}: {error}"
        if self.peers is None:
            if self._folder is not None:
                self._folder.end_attempt(code, reason, self.phases.step)
            return
        if of_the_runtime(error):
            # A collective breaks at once when a process goes; who went is known a little later, and ends this one too.
            time.sleep(self._patience_s)
        self.peers.on_failure = self._write_first_failure
        first = self.peers.fail(self.peers.own_failure(code, reason))
        if first["process"] != self.process:
            self._peer_failed(first)
        if isinstance(error, UserError):
            self.tell(f"k3train: error: {error}")
        else:
            traceback.print_exception(error)
        self.leave(code, reason)

    def leave(self, code: int, reason: str, step: int | None = None) -> None:
        """Record the end and end the process at once, from any thread, whatever the others do. Does not return."""
        if not self._leaving.acquire(blocking=False):
            threading.Event().wait()  # another thread is doing it
        step = self.phases.step if step is None else step

        def record() -> None:
            if self._folder is not None:
                self._folder.end_attempt(code, reason, step)
                self._write_process(ended=int(code))
            sys.stdout.flush()
            sys.stderr.flush()

        _within(_RECORD_S, record)
        if self.peers is not None:
            _within(_RECORD_S, self.peers.part)
        os._exit(code)

    def _interrupted(self) -> None:
        """Record that the user ends the process without a save: status.json must not say that it runs."""
        if self._folder is not None:
            self._folder.end_attempt(INTERRUPTED, "stopped at once by the user (SIGINT, twice)", self.phases.step)
            self._write_process(ended=INTERRUPTED)

    def _stuck(self, look: Snapshot, reason: str) -> None:
        """The watchdog's end."""
        if self.peers is not None:
            self.peers.on_failure = self._write_first_failure
            failure = self.peers.own_failure(ExitCode.WATCHDOG, reason)
            _within(_RECORD_S, partial(self.peers.fail, failure))
        self.tell(f"watchdog: {reason}; the process ends with {ExitCode.WATCHDOG:d}")
        self.leave(ExitCode.WATCHDOG, reason, look.step)

    def _peer_failed(self, failure: Failure) -> None:
        """Some process ended the run for all. Called from the beat, or by ``PeerWatch.fail``."""
        if failure.get("stopped"):
            self.stop.note(self.peers.stop_name() if self.peers else "SIGTERM")
            self.leave(failure["code"], failure["reason"])
        self._write_first_failure(failure)
        code = ExitCode.PEER_LOST if failure["code"] is None else failure["code"]
        text = describe(failure)
        if failure["process"] != self.process:
            self.tell(f"k3train: {text}; all processes end")
        self.leave(code, text)

    def _aborting(self) -> None:
        """The C runtime aborts this process: because process 0 is gone, or for a reason of its own."""
        assert self.peers is not None
        if self._coordinator and not reachable(self._coordinator):
            failure = self.peers.coordinator_death()
            self._write_first_failure(failure, main=True)
            self.tell(f"k3train: {describe(failure)}; all processes end")
            self._write_process(ended=int(ExitCode.PEER_LOST))
            os._exit(ExitCode.PEER_LOST)
        self._write_first_failure(self.peers.own_failure(134, "aborted by the runtime; see its output"), main=True)

    # Records

    def tell(self, text: str) -> None:
        """A line to standard error, from any thread."""
        with _quietly():
            os.write(2, f"{text}\n".encode())

    def _stacks_file(self, phase: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder.path / STACKS / f"{self.process}-{time.strftime('%Y%m%dT%H%M%S')}-{phase}.txt"

    def _write_status(self) -> None:
        if self._folder is not None and self._folder.status is not None:
            self._folder.status.write()

    def _write_process(self, ended: int | None = None) -> None:
        """``processes/<id>.json``: what this process does; with several processes the first place to look."""
        if self._folder is None or self.peers is None:
            return
        look = self.phases.look()
        content = {
            "process": self.process,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "phase": look.phase,
            "phase_s": round(look.age, 1),
            "step": look.step,
            "time": time.time(),
            "ended": ended,
        }
        folder = self._folder.path / PROCESSES
        folder.mkdir(exist_ok=True)
        write_whole(folder / f"{self.process}.json", json.dumps(content) + "\n")

    def _write_first_failure(self, failure: Failure, main: bool | None = None) -> None:
        """``first_failure.json``, once an attempt; by process 0, or whoever is left of them."""
        if self._folder is None or not (self.process == 0 if main is None else main):
            return
        path = self._folder.path / FIRST_FAILURE

        def write() -> None:
            if not path.exists() or path.stat().st_mtime < self._began:
                write_whole(path, json.dumps(failure, indent=1) + "\n")

        _within(_RECORD_S, write)


def of_the_runtime(error: BaseException) -> bool:
    """Whether XLA raised it, as where a collective breaks: an error of JAX's, or a ValueError with a status's name."""
    return type(error).__module__.startswith("jax") or (
        isinstance(error, ValueError) and bool(_STATUS.match(str(error)))
    )


def describe(failure: Failure) -> str:
    """A failure in one line."""
    where = f"process {failure['process']} (pid {failure['pid']} on {failure['host']})"
    return f"{where} failed first, in {failure['phase']} after step {failure['step']}: {failure['reason']}"


def _within(seconds: float, function: Callable[[], Any]) -> None:
    """Run ``function`` in a thread; wait ``seconds`` at most, and let nothing it raises through."""

    def run() -> None:
        with _quietly():
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


class _quietly:
    """Last records are made as far as they can be; what hinders them must not hide how the run ended."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        return isinstance(error, Exception)
