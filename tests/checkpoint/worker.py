"""One of several processes that restore, save and restore again; run by test_two_processes.py.

Usage: worker.py DIRECTORY PORT COUNT INDEX STEP [FROM]. Restores step FROM (or makes the state), saves it as STEP,
restores that, and prints one JSON object.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.checkpoint import manifest
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.state_hash import combined, state_hash
from k3train.parallel.coordination import Peers

SHAPES = {"w": (8, 16), "rows": (4, 6, 2), "bias": (3,), "step": ()}
SPECS = {"w": PartitionSpec("fsdp"), "rows": PartitionSpec(None, None, None), "bias": PartitionSpec(), "step": None}


def values(name):
    rng = np.random.default_rng(len(name))
    return rng.normal(size=SHAPES[name]).astype(np.float32)


def main(directory, port, count, index, step, source=None):
    if count > 1:
        jax.distributed.initialize(f"localhost:{port}", count, index)
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    shardings = {name: NamedSharding(mesh, spec or PartitionSpec()) for name, spec in SPECS.items()}
    abstract = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[name]) for name, shape in SHAPES.items()
    }
    hashed, notes = [], []
    really = manifest.sha256
    manifest.sha256 = lambda path: (hashed.append(path.name), really(path))[1]
    manager = CheckpointManager(
        directory, CheckpointConfig(keep=9), peers=Peers.of_this_run(30.0), run_id="mine", note=notes.append
    )
    if source is None:
        state = {
            name: jax.make_array_from_callback(shape, shardings[name], lambda at, n=name: values(n)[at])
            for name, shape in SHAPES.items()
        }
    else:
        assert manager.newest_good() == source, notes
        state, _ = manager.restore(source, abstract)
    hashed.clear()
    manager.save(step, state, {"step": step, "run_id": "mine"})
    manager.wait()
    share = sorted(set(hashed))
    state, meta = manager.restore(step, abstract)
    assert meta["step"] == step
    for name, array in state.items():
        for shard in array.addressable_shards:
            assert np.array_equal(shard.data, values(name)[shard.index])
    said = {"hash": combined(state_hash(state)), "share": share, "notes": notes}

    # One process cannot write: the save fails on all of them, is counted, and the next one works.
    if count > 1:
        really_write = manager.save

        def broken(path):
            raise OSError(28, "No space left on device")

        if index == count - 1:
            manifest.sha256 = broken
        really_write(step + 1, state, {"step": step + 1, "run_id": "mine"})
        try:
            manager.wait()
        except SaveFailed as error:
            said["failed"] = str(error)
        manifest.sha256 = really
        said["failures"] = manager.failures
        manager.save(step + 2, state, {"step": step + 2, "run_id": "mine"}, block=True)
        said["after"] = [manager.failures, manager.steps()]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
