"""Ends a run that gets stuck: at a phase's time limit it writes down every thread's stack, a while later it acts.

Imports no JAX, and needs neither storage nor network to find that out.
"""

import faulthandler
import threading
import time
from collections.abc import Callable
from pathlib import Path

from k3train.run.config import WatchdogConfig
from k3train.run.phases import Phase, Phases, Snapshot

_LOOK_S = 0.5


class Watchdog(threading.Thread):
    """Looks at the phases twice a second.

    Args:
      config: limits by phase.
      phases: what the run is doing.
      stacks: file for the stacks of a phase that is stuck; None where there is no run folder yet.
      say: a line to the user, from this thread.
      end: ends the process; hears phase and reason.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        phases: Phases,
        stacks: Callable[[Phase], Path | None],
        say: Callable[[str], None],
        end: Callable[[Snapshot, str], None],
    ):
        super().__init__(name="watchdog", daemon=True)
        self._config, self._phases, self._stacks, self._say, self._end = config, phases, stacks, say, end
        self._stop = threading.Event()
        self._warned: float | None = None  # when the stacks were written

    def run(self) -> None:  # noqa: D102 - the thread's
        while not self._stop.wait(_LOOK_S):
            self.look()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()

    def look(self) -> None:
        """One look."""
        now = self._phases.look()
        limit = limit_of(self._config, now.phase)
        if not limit or now.age <= limit:
            if self._warned is not None and (not limit or now.age < limit):
                self._say(f"watchdog: {now.phase} gets on again")
                self._warned = None
            return
        if self._warned is None:
            self._warned = time.monotonic()
            where = dump_stacks(self._stacks(now.phase))
            self._say(
                f"WARNING: watchdog: {now.phase} makes no progress for {now.age:.0f} s after step {now.step} "
                f"(run.watchdog.{_key(now.phase)}: {limit:g}); stacks of all threads: {where}; "
                f"the process ends in {self._config.grace_s:g} s unless it gets on"
            )
        elif time.monotonic() - self._warned >= self._config.grace_s:
            self._end(now, f"stuck in {now.phase} for {now.age:.0f} s after step {now.step} (watchdog)")
            self._stop.set()


def limit_of(config: WatchdogConfig, phase: Phase) -> float:
    """Seconds that a phase may take without progress; 0 is no limit."""
    return getattr(config, _key(phase))


def _key(phase: Phase) -> str:
    return "start_s" if phase == "restore" else f"{phase}_s"


def dump_stacks(path: Path | None) -> str:
    """Write the Python stacks of all threads to ``path``; to standard error where it is None or cannot be written.

    Returns where they are. Storage may be what is stuck, so that the write gets ten seconds.
    """
    done = threading.Event()

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        done.set()

    if path is not None:
        writer = threading.Thread(target=write, args=(path,), daemon=True)
        writer.start()
        if done.wait(10):
            return str(path)
    faulthandler.dump_traceback(all_threads=True)
    return "standard error"
