"""Several processes: start-up from named settings only, and the few things they say to each other.

A launcher sets the four variables; nothing is guessed from a scheduler's environment (operations.md 1.1).
"""

import itertools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import distributed as runtime  # the coordination service has no public door
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from k3train.config.errors import UserError

COORDINATOR = "K3TRAIN_COORDINATOR"
NUM_PROCESSES = "K3TRAIN_NUM_PROCESSES"
PROCESS_ID = "K3TRAIN_PROCESS_ID"
LOCAL_DEVICE_IDS = "K3TRAIN_LOCAL_DEVICE_IDS"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
# Our own watch over the peers (run/peers.py) comes first and can say who died; the runtime's only aborts.
_RUNTIME_IS_LATER_S = 15
_BARRIER_S = 24 * 3600.0
# Where the runtime's SIGTERM handler tells the other processes of it.
_NOTICE = "RECEIVED_PREEMPTION_NOTICE"
_ordinals: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_ordinals_lock = threading.Lock()


def initialize(environ: Mapping[str, str] | None = None, peer_timeout_s: float = 30.0) -> None:
    """Joins the other processes of the run; does nothing where none of the variables is set.

    Must run before anything asks for devices. ``K3TRAIN_COORDINATOR`` is host:port of process 0,
    ``K3TRAIN_NUM_PROCESSES`` and ``K3TRAIN_PROCESS_ID`` count from 0, ``K3TRAIN_LOCAL_DEVICE_IDS`` (optional)
    lists this process's devices as numbers among those it sees; left out, it takes all of them.

    Args:
      environ: the environment; the process's own by default.
      peer_timeout_s: seconds without a sign of life after which a process counts as dead.

    Raises:
      UserError: some of the variables but not all, or values that make no sense (exit 30).
    """
    environ = os.environ if environ is None else environ
    needed = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    missing = [key for key in needed if not environ.get(key)]
    if len(missing) == len(needed):
        if environ.get(LOCAL_DEVICE_IDS):
            raise UserError(f"{LOCAL_DEVICE_IDS} is set but {', '.join(needed)} are not")
        return
    if missing:
        raise UserError(f"a run of several processes needs {', '.join(needed)}; not set: {', '.join(missing)}")
    count, process = _number(environ, NUM_PROCESSES), _number(environ, PROCESS_ID)
    if not 0 <= process < count:
        raise UserError(f"{PROCESS_ID}={process} must lie in 0..{count - 1} ({NUM_PROCESSES}={count})")
    with _without_proxies():
        jax.distributed.initialize(
            coordinator_address=environ[COORDINATOR],
            num_processes=count,
            process_id=process,
            local_device_ids=_device_ids(environ),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=round(peer_timeout_s) + _RUNTIME_IS_LATER_S,
        )


def process_index() -> int:
    """Number of this process, from 0; asking starts no devices."""
    return runtime.global_state.process_id


def process_count() -> int:
    """Processes of the run; asking starts no devices."""
    return runtime.global_state.num_processes


def barrier(name: str) -> None:
    """Waits until every process is here; all must use the same names in the same order.

    It goes through the coordination service and not the devices, so that any thread may use it beside the training.
    """
    if process_count() > 1:
        with _ordinals_lock:
            ordinal = next(_ordinals[name])
        _client().wait_at_barrier(f"k3train/{name}/{ordinal}", round(_BARRIER_S * 1000))


def broadcast(value: Any) -> Any:
    """Process 0's ``value``, a small JSON value, on every process; the others' is not looked at."""
    if process_count() == 1:
        return value
    with _ordinals_lock:
        key = f"k3train/broadcast/{next(_ordinals['broadcast'])}"
    client = _client()
    if process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    return json.loads(client.blocking_key_value_get(key, round(_BARRIER_S * 1000)))


def reached_stop(tick: int) -> bool:
    """Whether all processes stop at ``tick``, because one of them got SIGTERM.

    Every process must ask with tick 0, 1, 2, ..., and each gets the same answers. Costs no communication.
    """
    return multihost_utils.reached_preemption_sync_point(tick)


class Notes:
    """Small texts that every process can write and read, kept by process 0."""

    def __init__(self) -> None:
        self._client = _client()

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


def local_rows(sharding: NamedSharding, rows: int) -> range:
    """Which rows of a global batch of ``rows`` this process has to supply.

    Raises:
      UserError: the rows do not divide over the devices.
      ValueError: the mesh does not keep the process's devices together.
    """
    shards = sharding.num_devices
    if rows % shards:
        raise UserError(f"a batch of {rows} rows does not divide over {shards} devices; make it a multiple of {shards}")
    indices = sharding.addressable_devices_indices_map((rows,)).values()
    cuts = {index[0].indices(rows)[:2] for index in indices if index is not None}
    first, last = min(start for start, _ in cuts), max(stop for _, stop in cuts)
    if sum(stop - start for start, stop in cuts) != last - first:
        raise ValueError("the mesh gives this process rows that do not lie together; order its devices by process")
    return range(first, last)


def global_array(sharding: NamedSharding, local: np.ndarray) -> jax.Array:
    """The global array of which each process supplies its own rows (``local_rows``)."""
    return jax.make_array_from_process_local_data(sharding, local)


def coordinator_address() -> str:
    """host:port of the coordination service; empty for a process by itself."""
    return runtime.global_state.coordinator_address or ""


def _client() -> Any:
    """The coordination service, from which processes learn of each other."""
    return runtime.global_state.client


def _number(environ: Mapping[str, str], key: str) -> int:
    try:
        return int(environ[key])
    except ValueError:
        raise UserError(f"{key}={environ[key]!r} is not a whole number") from None


def _device_ids(environ: Mapping[str, str]) -> list[int] | None:
    listed = environ.get(LOCAL_DEVICE_IDS)
    if not listed:
        return None
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError:
        raise UserError(f"{LOCAL_DEVICE_IDS}={listed!r} is not a list of numbers such as 0,1,2,3") from None


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides proxy variables: the coordinator's RPC library would send its connection through them."""
    hidden = {key: os.environ.pop(key) for key in list(os.environ) if key.lower() in _PROXIES}
    try:
        yield
    finally:
        os.environ.update(hidden)
