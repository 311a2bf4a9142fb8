"""Signals become a wish that the loop reads between its steps. Imports no JAX.

SIGTERM: preempted. SIGHUP: the terminal is gone. SIGUSR2: the time limit comes (a batch system's warning). SIGINT: the
user; a second one, later, ends the process at once with 130. A thread of its own hears them, so that they are heard
while the main thread waits in C code.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

from k3train.config.exit_codes import INTERRUPTED, ExitCode

SAVED = {
    "SIGTERM": ExitCode.PREEMPTED_SAVED,
    "SIGHUP": ExitCode.PREEMPTED_SAVED,
    "SIGUSR2": ExitCode.TIME_LIMIT_SAVED,
    "SIGINT": ExitCode.STOPPED_SAVED,
}
"""How a run ends that was asked to by a signal and lost nothing."""
_WORDS = {
    "SIGTERM": "preempted by the system (SIGTERM)",
    "SIGHUP": "the terminal was closed (SIGHUP)",
    "SIGUSR2": "the time limit comes (SIGUSR2)",
    "SIGINT": "stopped by the user (SIGINT)",
}
_ONE_PRESS = 0.1
"""Seconds within which a second SIGINT is the same one: ``timeout`` and launchers signal a process and its group."""


def exit_code(name: str, kept: bool, began: bool = True) -> ExitCode:
    """How a run ends that the signal ``name`` asked to.

    Args:
      name: SIGTERM, SIGHUP, SIGUSR2 or SIGINT.
      kept: a verified checkpoint holds the present state.
      began: the run has done a step, in this attempt or before. A user who stops a run that has not lost nothing.
    """
    return SAVED[name] if kept or (name == "SIGINT" and not began) else ExitCode.PREEMPTED_LOST


class StopRequest:
    """Hears the signals while it is entered (main thread only) and gives the old handlers back.

    ``bool(request)`` says whether to stop; the first signal decides why.

    Args:
      forward: with several processes: hears the name of each signal but SIGTERM, from a thread. SIGTERM is then left
        to JAX, which has its own handler; a second owner would silence it (operations.md 1.3).
    """

    def __init__(self, forward: Callable[[str], None] | None = None) -> None:
        self.name: str | None = None
        """The first signal's name."""
        self.since: float | None = None
        """When it came, ``time.monotonic()``."""
        self.at_once: Callable[[], None] = lambda: None
        """Called, from a thread, before a second SIGINT ends the process; must not take long."""
        self._forward, self._interrupts = forward, 0
        self._interrupted: float | None = None
        self._signals = [signal.SIGINT, signal.SIGUSR2] + ([] if forward else [signal.SIGTERM])
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            self._signals.append(signal.SIGHUP)
        self._old: dict[signal.Signals, object] = {}
        self._old_wakeup, self._write = -1, -1

    def __bool__(self) -> bool:
        return self.name is not None

    def note(self, name: str) -> None:
        """Ask to stop, as the signal ``name`` does; the first one counts."""
        if self.name is None:
            self.since = time.monotonic()
            self.name = name

    def describe(self) -> str:
        """The reason in words."""
        return _WORDS.get(self.name or "", "no stop was asked for")

    def pending(self) -> float:
        """Seconds since a stop was asked for; 0 where none was."""
        return time.monotonic() - self.since if self.since is not None else 0.0

    def _receive(self, name: str) -> None:
        self.note(name)
        if name == "SIGINT":
            now, before = time.monotonic(), self._interrupted
            self._interrupted = now
            if before is not None and now - before < _ONE_PRESS:
                return
            self._interrupts += 1
            if self._interrupts > 1:
                _say("stopped at once; nothing more was saved")
                with suppress(Exception):
                    self.at_once()
                os._exit(INTERRUPTED)
            _say("finishing this step, then saving; Ctrl-C again stops at once")
        if self._forward is not None:
            self._forward(name)

    def _listen(self, pipe: int) -> None:
        with os.fdopen(pipe, "rb", buffering=0) as heard:
            while numbers := heard.read(64):
                for number in numbers:
                    if number in self._signals:
                        self._receive(signal.Signals(number).name)

    def __enter__(self) -> "StopRequest":
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        threading.Thread(target=self._listen, args=(read,), name="signals", daemon=True).start()
        # Python writes a number into the pipe for every signal that has a Python handler, whatever it does.
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._signals:
            self._old[number] = signal.signal(number, _heard)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            # None means that the handler was not installed from Python and cannot be given back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._old.clear()
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._write)


@contextmanager
def nothing_to_save() -> Iterator[None]:
    """While entered (main thread, before ``StopRequest``), what asks to stop ends the process with PREEMPTED_LOST.

    The loading of JAX takes seconds; by the signal's default action a batch system would not know to requeue.
    """

    def leave(number: int, frame: object) -> None:
        _say(f"{_WORDS[signal.Signals(number).name]}; nothing was begun")
        os._exit(ExitCode.PREEMPTED_LOST)

    numbers = [n for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _say(text: str) -> None:
    """A line to standard error, whatever the main thread is in the middle of.

    Its reader may be gone: Ctrl-C ends the ``tee`` of ``k3train ... 2>&1 | tee log`` too.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def _heard(number: int, frame: object) -> None:
    """Keeps the signal's default action away; the listening thread does the work."""
