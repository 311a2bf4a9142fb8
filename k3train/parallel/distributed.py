"""Several processes: start-up from named settings only, and which rows of an array each supplies.

A launcher sets the four variables; nothing is guessed from a scheduler's environment (operations.md 1.1).
"""

import math
import os
import socket
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
      UserError: some of the variables but not all, or values that make no sense, or process 0's port is in use
        (exit 30).
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
    port = _port(environ)
    if process == 0:
        _refuse_taken(port)
    # On CPU, programs that do not wait for each other run side by side, and their collectives then meet in another
    # order on another process (seen: hashes of sharded arrays beside a step). A GPU's stream keeps the order.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
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


class Feed:
    """Brings this process's rows of global batches [rows, columns] onto the mesh.

    Every process supplies part ``index`` of ``count`` equal parts of the rows, whole; processes that share out the
    tokens of a row between them supply the same.

    Args:
      sharding: of a batch (``axes.batch_sharding``).
      rows, columns: of a global batch.

    Raises:
      UserError: the rows do not divide over the devices.
      ValueError: the mesh does not keep the process's rows together.
    """

    def __init__(self, sharding: NamedSharding, rows: int, columns: int):
        self._sharding, self._shape = sharding, (rows, columns)
        ways = math.prod(sharding.mesh.shape[axis] for axis in sharding.spec[0])
        if rows % ways:
            raise UserError(f"a batch of {rows} rows does not divide over {ways} devices; make it a multiple of {ways}")
        indices = sharding.addressable_devices_indices_map(self._shape).values()
        cuts = {index[0].indices(rows)[:2] for index in indices if index is not None}
        first, last = min(start for start, _ in cuts), max(stop for _, stop in cuts)
        size = last - first
        if sum(stop - start for start, stop in cuts) != size or rows % size or first % size:
            raise ValueError("the mesh gives this process rows that do not lie together; order its devices by process")
        self.index, self.count = first // size, rows // size
        self.rows = range(first, last)

    def __call__(self, local: np.ndarray) -> jax.Array:
        """The global array of which ``local`` [rows / count, columns] is this process's part."""

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(self._shape[0])
            return local[start - self.rows.start : stop - self.rows.start, index[1]]

        return jax.make_array_from_callback(self._shape, self._sharding, part)


def coordinator_address() -> str:
    """host:port of the coordination service; empty for a process by itself."""
    return runtime.global_state.coordinator_address or ""


def service() -> Any:
    """The coordination service, from which processes learn of each other; None for a process by itself."""
    return runtime.global_state.client


def _port(environ: Mapping[str, str]) -> int:
    host, _, port = environ[COORDINATOR].rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise UserError(f"{COORDINATOR}={environ[COORDINATOR]!r} must be host:port, with a port from 1 to 65535")
    return int(port)


def _refuse_taken(port: int) -> None:
    """Looks whether anything listens at the port: the runtime would crash there, or share it with another run."""
    try:
        with socket.socket() as probe:
            # As servers do: a port whose last connections are still being closed may be had.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError as error:
        raise UserError(
            f"port {port} of {COORDINATOR} cannot be used ({error.strerror}); process 0 listens there: give one that "
            "nothing else uses"
        ) from error


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
