"""Work beside the main thread, which stays free to answer signals. Imports no JAX."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_POLL = 0.1  # seconds between looks for a reason to give up


class _Call:
    """A call on its way: what is to be done, then its result or error."""

    def __init__(self, function: Callable, args: tuple):
        self.function, self.args = function, args
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self.result = self.function(*self.args)
        except BaseException as error:  # carried to the thread that asked
            self.error = error
        self.done.set()


class Aside:
    """One daemon thread for calls that may take long and cannot be interrupted."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call] | None = None
        self._abandoned: list[_Call] = []

    @property
    def busy(self) -> bool:
        """Whether a call that was given up still runs: then the process cannot end in the ordinary way."""
        return any(not call.done.is_set() for call in self._abandoned)

    def __call__(self, function: Callable, *args: Any, watch: Callable[[], None]) -> Any:
        """``function(*args)``; meanwhile calls ``watch`` ten times a second, which gives it up by raising."""
        if self._calls is None:
            self._calls = SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="aside", daemon=True).start()
        call = _Call(function, args)
        self._calls.put(call)
        try:
            while not call.done.wait(_POLL):
                watch()
        except BaseException:
            self._abandoned.append(call)
            self._calls = None  # whatever comes next gets a thread that is free
            raise
        if call.error is not None:
            raise call.error
        return call.result


def _serve(calls: "SimpleQueue[_Call]") -> None:
    while True:
        calls.get().run()


class Every(threading.Thread):
    """Calls ``function`` every ``seconds`` until ``stop``; what it raises is told once and does no harm.

    Args:
      note: hears of errors.
    """

    def __init__(self, name: str, seconds: float, function: Callable[[], None], note: Callable[[str], None]):
        super().__init__(name=name, daemon=True)
        self._seconds, self._function, self._note = seconds, function, note
        self._end = threading.Event()
        self._told: set[str] = set()

    def run(self) -> None:  # noqa: D102 - the thread's
        while not self._end.wait(self._seconds):
            try:
                self._function()
            except Exception as error:  # a record that cannot be written must not end the training
                text = f"WARNING: {self.name}: {type(error).__name__}: {error}"
                if text not in self._told:
                    self._told.add(text)
                    self._note(text)

    def stop(self, wait: float = 5.0) -> None:
        """Call no more; waits for a call under way, at most ``wait`` seconds."""
        self._end.set()
        if threading.current_thread() is not self and self.is_alive():
            self.join(wait)
