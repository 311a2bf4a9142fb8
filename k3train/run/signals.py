"""Signals become a wish that the loop reads between its steps. One process; imports no JAX.

SIGINT: finish the step, save, exit 13; a second one ends the process at once with 130. SIGTERM and SIGUSR2 (the warning
of a batch system): save, exit 10. The loop should also look while it evaluates, samples or waits for data.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Literal

from k3train.config.exit_codes import ExitCode

_PREEMPTING = (signal.SIGTERM, signal.SIGUSR2)


class StopRequest:
    """Catches the signals while it is entered (main thread only) and gives the old handlers back.

    ``bool(request)`` says whether to stop; the first signal decides why.
    """

    def __init__(self) -> None:
        self.reason: Literal["stopped", "preempted"] | None = None
        self.signal: signal.Signals | None = None
        self._interrupts = 0
        self._old: dict[signal.Signals, object] = {}

    def __bool__(self) -> bool:
        return self.reason is not None

    @property
    def exit_code(self) -> ExitCode:
        """How the process ends once its state is saved."""
        return ExitCode.STOPPED_SAVED if self.reason == "stopped" else ExitCode.PREEMPTED_SAVED

    def describe(self) -> str:
        """The reason in words, for exit.json."""
        if self.signal is None:
            return "no stop was asked for"
        who = "the user" if self.reason == "stopped" else "the system"
        return f"{self.reason} by {who} ({self.signal.name})"

    def _receive(self, number: int, frame: FrameType | None) -> None:
        # os.write, since a signal may arrive inside of print.
        received = signal.Signals(number)
        if received == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os.write(2, b"\nstopped at once; nothing more was saved\n")
                os._exit(130)
            os.write(2, b"\nfinishing this step, then saving; Ctrl-C again stops at once\n")
        if self.reason is None:
            self.reason = "preempted" if received in _PREEMPTING else "stopped"
            self.signal = received

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, *_PREEMPTING):
            self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._old.items():
            # None means that the handler was not installed from Python and cannot be given back by it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]
        self._old.clear()
