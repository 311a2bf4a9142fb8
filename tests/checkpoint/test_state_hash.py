"""The state's hash: the same on any mesh, another for any change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.checkpoint.state_hash import combined, state_hash

RNG = np.random.default_rng(0)


def mix(x, seed):
    """One element by hand, in Python integers."""
    x = (x + seed) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def by_hand(array):
    words = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    sums = [sum(mix(int(w) ^ mix(i, s), s) for i, w in enumerate(words)) % 2**32 for s in (0x9E3779B9, 0x85EBCA77)]
    return "{:08x}{:08x}".format(*sums)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool", "uint8"])
def test_by_hand(dtype):
    array = np.asarray(jnp.asarray(RNG.integers(0, 2 if dtype == "bool" else 99, (3, 5)), dtype))
    assert state_hash({"a": {"b": jnp.asarray(array)}}) == {"a.b": by_hand(array)}


def test_64_bits_count_both_halves():
    with jax.enable_x64(True):
        a, b = np.arange(4, dtype=np.int64), np.arange(4, dtype=np.int64) + (np.int64(1) << 40)
        hashes = [state_hash({"a": jnp.asarray(x)})["a"] for x in (a, b, a.astype(np.float64))]
    assert len(set(hashes)) == 3


def test_any_mesh_gives_the_same():
    whole = {"w": RNG.normal(size=(8, 12)).astype(np.float32), "n": np.int32(7)}
    devices = np.array(jax.devices()[:4])
    meshes = [
        (devices[:1], (1, 1), PartitionSpec()),
        (devices, (4, 1), PartitionSpec("a")),
        (devices[::-1], (4, 1), PartitionSpec(None, "a")),
        (devices, (2, 2), PartitionSpec("b", "a")),
        (devices, (2, 2), PartitionSpec("a")),
    ]
    hashes = set()
    for chosen, shape, spec in meshes:
        mesh = Mesh(chosen.reshape(shape), ("a", "b"))
        put = {"w": jax.device_put(whole["w"], NamedSharding(mesh, spec)), "n": jnp.asarray(whole["n"])}
        hashes.add(combined(state_hash(put)))
    assert len(hashes) == 1


@pytest.mark.parametrize("change", ["one bit", "swapped", "minus zero", "moved rows"])
def test_any_change_is_seen(change):
    before = RNG.normal(size=(6, 7)).astype(np.float32)
    before[2, 2] = 0.0
    after = before.copy()
    match change:
        case "one bit":
            after.view(np.uint32)[3, 4] ^= 1
        case "swapped":
            after[0, 0], after[0, 1] = before[0, 1], before[0, 0]
        case "minus zero":
            after[2, 2] = -0.0
        case _:
            after = np.roll(before, 1, axis=0)
    old, new = (state_hash({"w": jnp.asarray(x)})["w"] for x in (before, after))
    assert old[:8] != new[:8] and old[8:] != new[8:]  # each of the two sums by itself


def test_names_count_in_the_whole():
    one = jnp.ones((2,))
    assert combined(state_hash({"a": one})) != combined(state_hash({"b": one}))
