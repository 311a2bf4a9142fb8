"""Several processes: start-up from named settings only, and the few things they say to each other.

A launcher sets the four variables; nothing is guessed from a scheduler's environment (operations.md 1.1).
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from k3train.config.errors import UserError

COORDINATOR = "K3TRAIN_COORDINATOR"
NUM_PROCESSES = "K3TRAIN_NUM_PROCESSES"
PROCESS_ID = "K3TRAIN_PROCESS_ID"
LOCAL_DEVICE_IDS = "K3TRAIN_LOCAL_DEVICE_IDS"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def initialize(environ: Mapping[str, str] | None = None) -> None:
    """Joins the other processes of the run; does nothing where none of the variables is set.

    Must run before anything asks for devices. ``K3TRAIN_COORDINATOR`` is host:port of process 0,
    ``K3TRAIN_NUM_PROCESSES`` and ``K3TRAIN_PROCESS_ID`` count from 0, ``K3TRAIN_LOCAL_DEVICE_IDS`` (optional)
    lists this process's devices as numbers among those it sees; left out, it takes all of them.

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
        )


def process_index() -> int:
    """Number of this process, from 0."""
    return jax.process_index()


def process_count() -> int:
    """Processes of the run."""
    return jax.process_count()


def barrier(name: str) -> None:
    """Waits until every process is here; all must use the same name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def broadcast(value: Any) -> Any:
    """Process 0's ``value``, a small JSON value, on every process; the others' is not looked at."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode() if jax.process_index() == 0 else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(size, np.uint8)
    padded[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true on any process; every process must ask, and all get the same answer."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.asarray(flag))))


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
