"""Small texts between the processes of a run, through JAX's coordination service.

Unlike collectives these run beside a training step, from any thread, on no device. ``Peers`` exchanges what all
processes must come to: each exchange has a name that is used once, the same on all. ``Notes`` may be written and read
by any process at any time.
"""

import functools
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import jax

from k3train.parallel import distributed

_LONG_S = 24 * 3600.0  # data may have to be prepared first
# Where the runtime's SIGTERM handler tells the other processes of it.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"


class Store(Protocol):
    """What is used of the coordination service."""

    def key_value_set(self, key: str, value: str) -> None:
        """Publish a value."""
        ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait for a value."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Take a value back."""
        ...


class PeerFailed(RuntimeError):
    """Another process reported an error, or did not answer in time."""


class Peers:
    """The processes that work together; alone where there is no coordination service.

    Args:
      store: the coordination service's key-value store; None for a process by itself.
      index: this process's number, from 0.
      count: how many there are.
      timeout_s: longest wait for another process.
    """

    def __init__(self, store: Store | None = None, index: int = 0, count: int = 1, timeout_s: float = 600.0):
        self.index, self.count, self.timeout_s = index, count, timeout_s
        self._store = store
        self._serials: defaultdict[str, itertools.count] = defaultdict(itertools.count)

    @classmethod
    def of_this_run(cls, timeout_s: float = 600.0) -> "Peers":
        """The processes that ``jax.distributed`` joined."""
        if distributed.process_count() == 1:
            return cls()
        return cls(distributed.service(), distributed.process_index(), distributed.process_count(), timeout_s)

    @property
    def leads(self) -> bool:
        """Whether this is process 0, the one that writes."""
        return self.index == 0

    def name(self, purpose: str) -> str:
        """A name not used before; the same on every process, if all ask in the same order (so: in the main thread)."""
        return f"k3train/{purpose}/{next(self._serials[purpose])}"

    def together(self, name: str, act: Callable[[], Any]) -> list[Any]:
        """Run ``act`` on every process; what it returned (JSON) on each, by process number.

        Raises:
          PeerFailed: it failed on another process, or one did not answer within ``timeout_s``.
          Exception: what ``act`` raised here, after the others were told.
        """
        if self._store is None:
            return [act()]
        self._tell(self._store, name, act)
        return [self._answer(self._store, name, process) for process in range(self.count)]

    def lead(self, name: str, act: Callable[[], Any]) -> Any:
        """Run ``act`` on process 0 only; what it returned, on every process. Raises like ``together``."""
        if self._store is None:
            return act()
        if self.leads:
            self._tell(self._store, name, act)
        return self._answer(self._store, name, 0)

    def forget(self, *names: str) -> None:
        """Take this process's answers back, once no process can still be reading them."""
        if self._store is not None:
            for name in names:
                self._store.key_value_delete(f"{name}/{self.index}")

    def _tell(self, store: Store, name: str, act: Callable[[], Any]) -> None:
        """Run ``act`` and publish what came of it."""
        error, value = None, None
        try:
            value = act()
        except BaseException as caught:
            error = caught
        said = {"value": value, "error": None if error is None else f"{type(error).__name__}: {error}"}
        store.key_value_set(f"{name}/{self.index}", json.dumps(said))
        if error is not None:
            raise error

    def _answer(self, store: Store, name: str, process: int) -> Any:
        try:
            text = store.blocking_key_value_get(f"{name}/{process}", int(1000 * self.timeout_s))
        except Exception as error:  # jaxlib's errors have no common public type
            raise PeerFailed(f"process {process} did not answer within {self.timeout_s:.0f} s ({name})") from error
        said = json.loads(text)
        if said["error"] is not None:
            raise PeerFailed(f"process {process} failed: {said['error']}")
        return said["value"]


@functools.cache
def _of_this_run() -> Peers:
    return Peers.of_this_run(_LONG_S)


def barrier(purpose: str) -> None:
    """Waits until every process is here; in the main thread. Raises like ``Peers.together``."""
    peers = _of_this_run()
    peers.together(peers.name(f"barrier/{purpose}"), lambda: None)


def broadcast(value: Any) -> Any:
    """Process 0's ``value``, a small JSON value, on every process; the others' is not looked at. Main thread only."""
    peers = _of_this_run()
    return peers.lead(peers.name("broadcast"), lambda: value)


class Notes:
    """Small texts that every process can write and read, kept by process 0."""

    def __init__(self) -> None:
        self._client = distributed.service()

    def set(self, key: str, value: str, once: bool = False) -> bool:
        """Write ``key``; with ``once`` only where nobody has. Returns whether it was written."""
        try:
            self._client.key_value_set(f"k3train/{key}", value, allow_overwrite=not once)
        except jax.errors.JaxRuntimeError as error:
            if once and "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def get(self, key: str) -> str | None:
        """The text under ``key``; None where there is none."""
        return self._get(f"k3train/{key}")

    def stop_notice(self) -> bool:
        """Whether any process got SIGTERM (known to all within about two seconds)."""
        return self._get(_NOTICE) is not None

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def below(self, folder: str) -> dict[str, str]:
        """All texts whose key is ``folder/<name>``, by name."""
        return {key.rsplit("/", 1)[1]: value for key, value in self._client.key_value_dir_get(f"k3train/{folder}/")}
