"""Two processes save together; one restores. Process 0 commits, and both know when it has."""

import socket
import subprocess
import sys

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager

WORKER = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax._src import distributed
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager

directory, port, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, index)
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
whole = np.arange(64, dtype=np.float32).reshape(8, 8)
state = {"w": jax.make_array_from_callback((8, 8), sharding, lambda at: whole[at])}
barrier = lambda name: distributed.global_state.client.wait_at_barrier(name, 60_000)
manager = CheckpointManager(directory, CheckpointConfig(), process=index, barrier=barrier)
manager.save(3, state, {"step": 3})
manager.wait()
assert manager.steps() == [3]
abstract = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)}
restored, meta = manager.restore(3, abstract)
for shard in restored["w"].addressable_shards:
    assert np.array_equal(shard.data, whole[shard.index])
"""


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", WORKER, str(tmp_path), str(port)]
    workers = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in (0, 1)
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=100)
            assert worker.returncode == 0, output
    finally:
        for worker in workers:
            worker.kill()
    manager = CheckpointManager(tmp_path, CheckpointConfig())
    sharding = SingleDeviceSharding(jax.devices()[0])
    state, meta = manager.restore(3, {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding)})
    assert np.array_equal(state["w"], np.arange(64, dtype=np.float32).reshape(8, 8)) and meta == {"step": 3}
