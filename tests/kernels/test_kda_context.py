"""A row shared out over devices gives what one device gives, whatever lies on the borders."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from k3train.kernels.kda.api import document_starts, kda
from k3train.kernels.kda.context import last_ids
from k3train.kernels.kda.specs import TOLERANCE, Shape, inputs

SHAPE = Shape(2, 48, 2, 8, 4)
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
SPECS = {name: P(None, "context") for name in NAMES} | {"initial_state": P()}


def rows(*lengths: int) -> np.ndarray:
    """Documents of these lengths, negative for padding, in one row."""
    ids, document = [], 0
    for length in lengths:
        document += length > 0
        ids += [document if length > 0 else 0] * abs(length)
    return np.array(ids + [0] * (SHAPE.tokens - len(ids)), np.int32)


# Shards of 12 (4 devices) or 24: documents over all of them, that end on borders, inside, in padding, in single tokens.
PACKED = {
    "one": np.stack([rows(48), rows(47)]),
    "on borders": np.stack([rows(12, 12, 24), rows(24, 24)]),
    "across": np.stack([rows(5, 30, 1, 1, 11), rows(13, 10, 2, 23)]),
    "padding across": np.stack([rows(10, -20, 18), rows(3, -40)]),
    "padding inside": np.stack([np.r_[rows(48)[:20], np.zeros(10, np.int32), rows(48)[:18]], rows(1, -12, 11, 24)]),
}


@partial(jax.jit, static_argnames=("devices",))
def whole_and_shared(arrays, ids, cotangents, devices: int):
    """(outputs, gradients) on one device and on ``devices``."""

    def loss(arrays, run):
        o, state = run(arrays)
        return jnp.sum(o * cotangents["o"]) + jnp.sum(state * cotangents["state"]), (o, state)

    def one(arrays):
        return kda(**arrays, segment_ids=ids, chunk=8)

    def shared(arrays):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("context",))

        def shard(arrays, ids):
            o, state = kda(**arrays, segment_ids=ids, chunk=8, axis="context")
            return o, state[None]

        specs = {name: SPECS[name] for name in arrays}
        run = jax.shard_map(
            shard, mesh=mesh, in_specs=(specs, P(None, "context")), out_specs=(P(None, "context"), P("context")),
            check_vma=False,
        )  # fmt: skip
        o, states = run(arrays, ids)
        return o, states[-1]

    return [jax.value_and_grad(partial(loss, run=run), has_aux=True)(arrays) for run in (one, shared)]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("decay", ["bounded", "strong"])
def test_a_shared_row_is_the_whole_row(packed, decay, devices):
    arrays = {name: x.astype(np.float32) for name, x in inputs(SHAPE, decay).items()}
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    cotangents = {"o": draw(2, 48, 2, 4), "state": draw(2, 2, 8, 4)}
    (want, want_grads), (got, got_grads) = whole_and_shared(arrays, PACKED[packed], cotangents, devices)
    for name, a, b in [("o", got[1][0], want[1][0]), ("state", got[1][1], want[1][1])] + [
        (name, got_grads[name], want_grads[name]) for name in NAMES
    ]:
        worst = np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)
        assert worst < TOLERANCE["float32"], (name, worst)


@pytest.mark.parametrize("packed", PACKED)
def test_borders_of_documents_are_found_across_devices(packed):
    ids = PACKED[packed]
    mesh = Mesh(np.array(jax.devices()[:4]), ("context",))
    shard = lambda ids: document_starts(ids, last_ids(ids, "context"))  # noqa: E731
    got = jax.shard_map(shard, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))(ids)
    np.testing.assert_array_equal(got, document_starts(jnp.asarray(ids)))


def test_what_travels_does_not_grow_with_the_row():
    """Bytes of all collectives of a forward and backward pass, at two lengths."""

    def bytes_at(tokens: int) -> int:
        arrays = {name: x.astype(np.float32) for name, x in inputs(Shape(1, tokens, 2, 8, 4), "bounded").items()}
        mesh = Mesh(np.array(jax.devices()[:2]), ("context",))

        def loss(arrays, ids):
            return jax.lax.psum(jnp.sum(kda(**arrays, segment_ids=ids, chunk=8, axis="context")[0]), "context")

        run = jax.shard_map(loss, mesh=mesh, in_specs=(SPECS, P(None, "context")), out_specs=P(), check_vma=False)
        jaxpr = jax.make_jaxpr(jax.grad(run))(arrays, np.ones((1, tokens), np.int32))
        return sum(
            int(np.prod(out.aval.shape)) * out.aval.dtype.itemsize
            for equation in equations(jaxpr.jaxpr)
            if equation.primitive.name in ("all_gather", "psum", "ppermute", "reduce_scatter", "all_to_all")
            for out in equation.outvars
        )

    assert bytes_at(32) == bytes_at(128) > 0
