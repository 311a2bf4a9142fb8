"""Start-up settings, and two real processes on CPU that talk to each other."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from launch import meeting

from k3train.config.errors import UserError
from k3train.parallel import coordination, distributed
from k3train.parallel.axes import batch_sharding
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh

WORKER = """
import json, sys
import jax, numpy as np
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
from k3train.parallel import coordination, distributed
from k3train.parallel.axes import batch_sharding
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh

distributed.initialize()
me = distributed.process_index()
mesh = build_mesh(MeshConfig(replica=2, fsdp=2))
sharding = batch_sharding(mesh)
feed = distributed.Feed(sharding, 8, 3)
rows = feed.rows
local = np.arange(8, dtype=np.int32)[rows.start : rows.stop, None] * np.ones((1, 3), np.int32)
batch = feed(local)
total = jax.jit(lambda x: x.sum())(batch)
told = coordination.broadcast({"run": "abc", "step": [1, 2]} if me == 0 else None)
coordination.barrier("done")
with open(sys.argv[1], "w") as out:  # gloo writes on stdout
    json.dump({"me": me, "count": distributed.process_count(), "devices": jax.device_count(),
               "rows": [rows.start, rows.stop], "shape": batch.shape, "total": int(total), "told": told}, out)
"""


def test_two_processes(tmp_path):
    workers = []
    for process, found in enumerate(meeting(2)):
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"} | found
        command = [sys.executable, "-c", WORKER, str(tmp_path / f"{process}.json")]
        workers.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        said = [worker.communicate(timeout=120)[0].decode() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
    results = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(2)]
    for process, result in enumerate(results):
        assert result == {"me": process, "count": 2, "devices": 4, "rows": [4 * process, 4 * process + 4],
                          "shape": [8, 3], "total": 84, "told": {"run": "abc", "step": [1, 2]}}  # fmt: skip


FULL = {distributed.COORDINATOR: "host:1234", distributed.NUM_PROCESSES: "2", distributed.PROCESS_ID: "1"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({distributed.COORDINATOR: "host:1234"}, distributed.NUM_PROCESSES),
        ({distributed.LOCAL_DEVICE_IDS: "0"}, distributed.COORDINATOR),
        (FULL | {distributed.PROCESS_ID: "2"}, "0..1"),
        (FULL | {distributed.PROCESS_ID: "two"}, "'two'"),
        (FULL | {distributed.LOCAL_DEVICE_IDS: "0;1"}, "'0;1'"),
        (FULL | {distributed.COORDINATOR: "host"}, "'host' must be host:port"),
        (FULL | {distributed.COORDINATOR: "host:70000"}, "from 1 to 65535"),
    ],
)
def test_bad_settings_are_named(environ, named):
    with pytest.raises(UserError, match=named) as error:
        distributed.initialize(environ)
    assert error.value.exit_code == 30


def test_settings_are_passed_on_and_nothing_is_guessed(monkeypatch):
    calls = []
    monkeypatch.setattr("jax.distributed.initialize", lambda **given: calls.append((given, dict(os.environ))))
    monkeypatch.setenv("HTTPS_PROXY", "http://nowhere:1")
    distributed.initialize({})
    assert not calls
    distributed.initialize(FULL | {distributed.LOCAL_DEVICE_IDS: "2,3"})
    given, environ = calls[0]
    assert given == {"coordinator_address": "host:1234", "num_processes": 2, "process_id": 1,
                     "local_device_ids": [2, 3], "cluster_detection_method": "deactivate",
                     "heartbeat_timeout_seconds": 45}  # fmt: skip
    assert "HTTPS_PROXY" not in environ and os.environ["HTTPS_PROXY"] == "http://nowhere:1"


def test_one_process_alone():
    assert distributed.process_count() == 1 and distributed.process_index() == 0
    coordination.barrier("alone")
    assert coordination.broadcast({"a": 1}) == {"a": 1}
    sharding = batch_sharding(build_mesh(MeshConfig(replica=2, fsdp=2)))
    feed = distributed.Feed(sharding, 8, 3)
    assert (feed.index, feed.count, feed.rows) == (0, 1, range(8))
    local = np.arange(24).reshape(8, 3).astype(np.int32)
    np.testing.assert_array_equal(feed(local), local)
    with pytest.raises(UserError, match="multiple of 4"):
        distributed.Feed(sharding, 6, 3)
