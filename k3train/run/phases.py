"""What the run is doing right now, since when, and how its time was spent. Imports no JAX."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, get_args

Phase = Literal["start", "restore", "compile", "data", "step", "eval", "save", "sample"]
"""start: put together, data prepared; restore: weights made or read; data: waiting for a batch; step: all else in the
loop; save: the share of saving that holds the training up."""
PHASES: tuple[Phase, ...] = get_args(Phase)


class Snapshot(NamedTuple):
    """A look at the phases from another thread.

    Attributes:
      phase: what is being done.
      step: optimizer steps done.
      age: seconds since the phase began or last got on.
      seconds: seconds spent so far, by phase.
    """

    phase: Phase
    step: int
    age: float
    seconds: dict[str, float]


class Phases:
    """The clock of one attempt; the main thread says what it does, others look.

    Args:
      already: seconds spent before the clock was made; counted as start.
      clock: seconds, monotonic.
    """

    def __init__(self, already: float = 0.0, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._phase: Phase = "start"
        self.step = 0
        """Optimizer steps done."""
        self._seconds = dict.fromkeys(PHASES, 0.0) | {"start": already}
        self._entered = self._alive = clock()

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; returns the one that it ends."""
        now = self._clock()
        with self._lock:
            before = self._phase
            self._seconds[before] += now - self._entered
            self._phase, self._entered, self._alive = phase, now, now
        return before

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Be in ``phase`` for the body, then in the one before."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def got_on(self) -> None:
        """Say that a long phase makes progress, so that its time limit begins anew."""
        self._alive = self._clock()

    def look(self) -> Snapshot:
        """The present state."""
        now = self._clock()
        with self._lock:
            seconds = {**self._seconds, self._phase: self._seconds[self._phase] + now - self._entered}
            return Snapshot(self._phase, self.step, now - self._alive, seconds)
