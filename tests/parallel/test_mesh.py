"""Mesh sizes and the logical-axis rules."""

import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

from k3train.config.errors import UserError
from k3train.models.param import ParamSpec
from k3train.parallel.axes import (
    batch_sharding,
    param_shardings,
    partition,
    refuse_replicated,
    render,
    replicated,
    sharding_report,
)
from k3train.parallel.config import AXES, MeshConfig
from k3train.parallel.mesh import axis_sizes, build_mesh


def mesh(**sizes):
    cfg = MeshConfig(**{"replica": 1, "fsdp": 4} | sizes)
    return build_mesh(cfg, jax.devices()[: math.prod(getattr(cfg, axis) for axis in AXES)])


@pytest.mark.parametrize(
    ("sizes", "devices", "want"),
    [
        ({}, 4, (4, 1, 1, 1, 1)),
        ({"fsdp": 2}, 8, (4, 2, 1, 1, 1)),
        ({"replica": 2, "fsdp": -1}, 8, (2, 4, 1, 1, 1)),
        ({"replica": 1, "expert": -1, "context": 2}, 8, (1, 1, 4, 2, 1)),
        ({"replica": 2, "fsdp": 2, "expert": 2, "context": 2, "tensor": 2}, 32, (2, 2, 2, 2, 2)),
    ],
)
def test_sizes(sizes, devices, want):
    assert axis_sizes(MeshConfig(**sizes), devices) == want


@pytest.mark.parametrize(
    ("sizes", "devices"),
    [
        ({"replica": 2, "fsdp": 2}, 8),
        ({"fsdp": 3}, 4),
        ({"replica": 4, "fsdp": 4}, 8),
        ({"replica": 8, "fsdp": -1}, 4),
        ({"replica": 1, "context": 2, "tensor": 4}, 4),
    ],
)
def test_sizes_that_do_not_fit_name_the_keys(sizes, devices):
    with pytest.raises(UserError) as error:
        axis_sizes(MeshConfig(**sizes), devices)
    message = str(error.value)
    assert all(f"mesh.{axis}={size}" in message for axis, size in sizes.items() if size != 1), message
    assert str(devices) in message and error.value.exit_code == 30


def test_axes_are_auto_and_tensor_shares_are_neighbours():
    built = mesh(replica=2, fsdp=1, tensor=2)
    assert built.axis_names == AXES
    assert set(built.axis_types) == {AxisType.Auto}
    assert np.vectorize(lambda d: d.id)(built.devices).reshape(2, 2).tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("sizes", "shape", "axes", "want"),
    [
        ({}, (8, 12), ("embed", "heads"), P("fsdp")),
        ({}, (12, 8), ("heads", "embed"), P(None, "fsdp")),
        ({}, (3, 8, 12), ("embed", "heads"), P(None, "fsdp")),  # stacked: the layer axis stays whole
        ({}, (6, 12), ("embed", "heads"), P(None, "fsdp")),  # 6 does not divide by 4, the next axis does
        ({}, (6, 10), ("embed", "heads"), P()),
        ({}, (8, 6, 6), ("experts", "latent", "expert_mlp"), P("fsdp")),
        ({}, (6, 8, 12), ("experts", "latent", "expert_mlp"), P(None, "fsdp")),
        ({}, (4, 8), ("taps", "heads"), P(None, "fsdp")),
        ({}, (8,), ("embed",), P()),
        ({}, (3, 8), ("embed",), P()),
        ({}, (8, 8), (None, "mlp"), P(None, "fsdp")),
        ({"fsdp": 1, "replica": 4}, (8, 12), ("embed", "heads"), P()),  # replica holds copies
        ({"fsdp": 2, "tensor": 2}, (8, 12), ("embed", "heads"), P("fsdp", "tensor")),
        ({"fsdp": 2, "tensor": 2}, (8, 12), ("embed", "latent"), P(("fsdp", "tensor"))),  # not a tensor dimension
        ({"fsdp": 2, "expert": 2}, (8, 6, 6), ("experts", "latent", "expert_mlp"), P(("expert", "fsdp"))),
        ({"fsdp": 2, "expert": 2}, (2, 6, 6), ("experts", "latent", "expert_mlp"), P("expert", "fsdp")),
        ({"fsdp": 2, "context": 2}, (8, 12), ("embed", "heads"), P(("fsdp", "context"))),
        ({"fsdp": 2, "context": 2}, (6, 12), ("embed", "heads"), P("fsdp", "context")),  # 3 left: the next takes it
    ],
)
def test_partition(sizes, shape, axes, want):
    assert partition(mesh(**sizes), shape, axes) == want


def test_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="'hedas'"):
        partition(mesh(), (8, 8), ("embed", "hedas"))


SPECS = {"stack": {0: {"w": ParamSpec(("embed", "mlp")), "norm": ParamSpec(("embed",))}},
         "prefix": {0: {"odd": ParamSpec(("embed", "vocab"))}, 1: {"odd": ParamSpec(("embed", "vocab"))}}}  # fmt: skip


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "stack": {0: {"w": array(2, 8, 16), "norm": array(2, 8)}},
    "prefix": {i: {"odd": array(513, 1025)} for i in range(2)},
}


def test_param_shardings_place_arrays():
    shardings = param_shardings(mesh(), PARAMS, SPECS)
    assert jax.tree.structure(shardings) == jax.tree.structure(PARAMS)
    array = jax.device_put(np.zeros((2, 8, 16), np.float32), shardings["stack"][0]["w"])
    assert {shard.data.shape for shard in array.addressable_shards} == {(2, 2, 16)}
    made = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), PARAMS), out_shardings=shardings)()
    assert made["stack"][0]["w"].sharding == shardings["stack"][0]["w"]


def test_batch_over_all_devices():
    batch = jax.device_put(np.zeros((8, 3), np.int32), batch_sharding(mesh(replica=2, fsdp=2)))
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 3)}
    assert replicated(mesh()).is_fully_replicated


def test_report():
    rows = {row.name: row for row in sharding_report(mesh(), PARAMS, SPECS)}
    assert rows["stack.*.w"].bytes_a_device == 2 * 8 * 16 * 4 // 4
    assert rows["stack.*.norm"].note == ""  # small
    odd = rows["prefix.*.odd"]
    assert odd.arrays == 2 and odd.note == "replicated" and odd.bytes_a_device == 2 * 513 * 1025 * 4
    assert next(iter(rows)) == "prefix.*.odd"  # largest first
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(list(rows.values())))
    assert "replicated" in console.export_text()
    refuse_replicated(list(rows.values()), 3)
    with pytest.raises(UserError, match=r"prefix.\*.odd \[513x1025\], 2 MiB") as error:
        refuse_replicated(list(rows.values()), 1)
    assert error.value.exit_code == 32
    whole = {row.name: row.note for row in sharding_report(mesh(replica=4, fsdp=1), PARAMS, SPECS)}
    assert set(whole.values()) == {""}  # without fsdp replication is what was asked for
