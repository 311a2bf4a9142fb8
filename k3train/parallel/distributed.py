"""Several processes: start-up from named settings only, and which rows of an array each supplies.

A launcher sets the four variables; nothing is guessed from a scheduler's environment (operations.md 1.1).
"""

import os
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
# Our own watch over the peers (run/peer_watch.py) comes first and can say who died; the runtime's only aborts.
_RUNTIME_IS_LATER_S = 15


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


def reached_stop(tick: int) -> bool:
    """Whether all processes stop at ``tick``, because one of them got SIGTERM.

    Every process must ask with tick 0, 1, 2, ..., and each gets the same answers. Costs no communication.
    """
    return multihost_utils.reached_preemption_sync_point(tick)


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


def service() -> Any:
    """The coordination service, from which processes learn of each other; None for a process by itself."""
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
