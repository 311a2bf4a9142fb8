"""A hash of a state that no mesh can change: it tells whether what came back is what was saved.

Each array's hash is a sum, modulo 2^32, over its elements of an integer mix of the element's bits and its place in the
whole array. Sums of integers do not depend on their order, so any sharding gives the same number, and nothing is
gathered but the sum. Two independent mixes give 64 bits. The mixer is the finaliser of MurmurHash3 (32 bits).
"""

import functools
import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3train.checkpoint.arrays import Tree, dotted

_SEEDS = (0x9E3779B9, 0x85EBCA77)  # the golden ratio's bits, and another odd constant


def state_hash(tree: Tree) -> dict[str, str]:
    """16 hex digits for each array of a tree by dotted name, equal on any mesh; waits for the devices."""
    return fetch(begin(tree))


def begin(tree: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Start hashing on the devices: the two sums of each array, still being computed.

    The arrays may be donated once this returns. Every process of the mesh must call it.
    """
    return {dotted(path): _sums(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def fetch(sums: dict[str, tuple[jax.Array, jax.Array]]) -> dict[str, str]:
    """The digits of what ``begin`` started."""
    return {name: f"{int(a):08x}{int(b):08x}" for name, (a, b) in jax.device_get(sums).items()}


def combined(hashes: dict[str, str]) -> str:
    """One hash (16 hex digits) of all arrays' hashes and names."""
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:16]


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two sums over an array's elements, uint32 scalars."""
    place = _place(x.shape)
    first, second = (
        functools.reduce(
            lax.add,
            (
                jnp.sum(_mix(word ^ _mix(place, seed + 2 * number), seed), dtype=jnp.uint32)
                for number, word in enumerate(_words(x))
            ),
        )
        for seed in _SEEDS
    )
    return first, second


def _words(x: jax.Array) -> list[jax.Array]:
    """An element's bits as one uint32 (two for 64-bit elements), each of the array's shape."""
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [word for part in (x.real, x.imag) for word in _words(part)]
    bits = x.dtype.itemsize * 8
    if bits == 64:
        words = lax.bitcast_convert_type(x, jnp.uint32)
        return [words[..., 0], words[..., 1]]
    return [lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}")).astype(jnp.uint32)]


def _place(shape: tuple[int, ...]) -> jax.Array:
    """Each element's row-major index, as uint32 of the array's shape.

    It wraps past 2^32 elements; the first coordinate is therefore mixed in, so that no two places of an array of less
    than 2^32 elements in a row are alike.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(shape[axis + 1 :]) % 2**32
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride)
    if math.prod(shape) > 2**32:
        index = index ^ _mix(lax.broadcasted_iota(jnp.uint32, shape, 0), _SEEDS[0])
    return index


def _mix(x: jax.Array, seed: int) -> jax.Array:
    """A bijection of 32 bits in which every input bit reaches every output bit."""
    x = x + np.uint32(seed % 2**32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
