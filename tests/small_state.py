"""A small state of several dtypes for the checkpoint tests, and ways to damage what lies on disk."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

META = {"step": 10, "samples": 320, "tokens": 5120, "config": {"run": {"seed": 0}}, "versions": {"jax": "x"}}
MARKERS = ("manifest.json", "quarantined.json", "retired.json", "keep.json")


def make_state(sharding=None, seed=0):
    rng = np.random.default_rng(seed)
    put = lambda x: jax.device_put(x, sharding or on_one())  # noqa: E731
    return {
        "params": {
            "embed": {"weight": put(rng.normal(size=(16, 8)).astype(np.float32))},
            "layers": {"w": put(rng.normal(size=(8, 4, 4)).astype(np.float32))},
        },
        "opt": {"momentum": put(jnp.asarray(rng.normal(size=(16, 8)), jnp.bfloat16))},
        "step": jax.device_put(jnp.asarray(10, jnp.int32)),
    }


def on_four():
    return NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(4), ("fsdp",)), PartitionSpec("fsdp"))


def on_one():
    return SingleDeviceSharding(jax.devices()[0])


def abstract_of(state, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=on_one() if x.ndim == 0 else (sharding or x.sharding)
        ),
        state,
    )


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b))


def flip(path, bit=2):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1 << bit
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def biggest(folder):
    files = [p for p in pathlib.Path(folder).rglob("*") if p.is_file() and p.name not in MARKERS]
    return max(files, key=lambda p: p.stat().st_size)
