"""What a checkpoint costs: how long a save holds the training up, when it is verified, how long a restore takes.

    python scripts/bench/checkpoint.py FOLDER --gib 4 --arrays 64     # writes to, and deletes, a new folder in FOLDER

The state is random float32 in equal arrays, sharded over all devices. A step of matrix products runs beside the save,
to show that training goes on. Prints a table: seconds, and GiB/s of the state.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.state_hash import combined, state_hash

WIDTH = 1024


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    value = act()
    return time.monotonic() - began, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--arrays", type=int, default=64)
    args = parser.parse_args()
    devices = jax.devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("fsdp",)), PartitionSpec("fsdp"))
    rows = max(round(args.gib * 2**30 / 4 / args.arrays / WIDTH / len(devices)), 1) * len(devices)
    make = jax.jit(lambda key: jax.random.normal(key, (rows, WIDTH)), out_shardings=sharding)
    keys = jax.random.split(jax.random.key(0), args.arrays)
    state = {"params": {f"w{i}": make(key) for i, key in enumerate(keys)}}
    gib = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**30
    jax.block_until_ready(state)
    step = jax.jit(lambda x: x @ x / WIDTH)
    square = step(jnp.ones((WIDTH, WIDTH)))
    table = Table(
        "", "seconds", "GiB/s", title=f"{gib:.2f} GiB, {args.arrays} arrays, {len(devices)} x {devices[0].device_kind}"
    )

    def row(what: str, seconds: float) -> None:
        table.add_row(what, f"{seconds:.3f}", f"{gib / seconds:.2f}")

    state_hash(state)  # compiles
    seconds, before = timed(lambda: combined(state_hash(state)))
    row("state hash", seconds)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        manager = CheckpointManager(Path(folder) / "checkpoints", CheckpointConfig(keep=1))
        for number in (1, 2):
            began = time.monotonic()
            seconds, _ = timed(lambda n=number: manager.save(n, state, {"step": n}))
            row(f"save {number}: training held up", seconds)
            steps = 0
            while not manager.poll():
                square = jax.block_until_ready(step(square))
                steps += 1
            row(f"save {number}: written, committed, read back ({steps} steps beside it)", time.monotonic() - began)
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        fresh = CheckpointManager(manager.directory, CheckpointConfig())
        seconds, good = timed(fresh.newest_good)
        row("verify", seconds)
        seconds, (restored, _) = timed(lambda: fresh.restore(good, abstract))
        row("restore, state hash compared", seconds)
        assert combined(state_hash(restored)) == before
    Console().print(table)


if __name__ == "__main__":
    main()
