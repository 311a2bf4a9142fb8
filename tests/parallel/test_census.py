"""Bytes and FLOPs read from compiled programs are those the program was written with."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from k3train.parallel.census import census
from k3train.parallel.config import MeshConfig
from k3train.parallel.mesh import build_mesh

ROWS, LOOPS = 8, 5


def compiled(function, spec, shape, **sizes) -> tuple[str, dict[str, int]]:
    mesh = build_mesh(MeshConfig(**{"replica": 1} | sizes))
    run = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(run).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
    return text, dict(mesh.shape)


CASES = {
    # function, bytes that leave a device of an [8, 16] float32 shard
    "all-gather": (lambda x, axis: lax.all_gather(x, axis).sum(0), 512 * 3),
    "all-reduce": (lambda x, axis: lax.psum(x, axis), 2 * 512 * 3 / 4),
    "reduce-scatter": (lambda x, axis: jnp.tile(lax.psum_scatter(x, axis, tiled=True), (4, 1)), 512 * 3 / 4),
    "all-to-all": (lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), 512 * 3 / 4),
    "collective-permute": (lambda x, axis: lax.ppermute(x, axis, [(i, (i + 1) % 4) for i in range(4)]), 512),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("axis", ["fsdp", "tensor"])
def test_collectives_have_their_axis_and_bytes_and_loops_count(kind, axis):
    function, want = CASES[kind]

    def run(x):
        return lax.scan(lambda x, _: (jnp.tanh(function(x, axis)), None), x, None, length=LOOPS)[0]

    text, mesh = compiled(run, P(axis), (4 * ROWS, 16), **{axis: 4})
    found = [row for row in census(text, mesh).moved if row.kind == kind]
    assert [(row.axes, row.times) for row in found] == [((axis,), LOOPS)]
    assert found[0].bytes == pytest.approx(LOOPS * want)


def test_two_axes_are_told_apart():
    def run(x):
        return lax.psum(jnp.tanh(lax.psum(x, "replica")), ("fsdp",)) + lax.psum(jnp.sin(x), ("replica", "fsdp"))

    text, mesh = compiled(run, P(("replica", "fsdp")), (4 * ROWS, 16), replica=2, fsdp=2)
    rows = census(text, mesh).moved
    assert {row.axes for row in rows} == {("replica",), ("fsdp",), ("replica", "fsdp")}


def test_flops_of_dots_in_loops():
    def run(x):
        body = partial(jnp.einsum, "ij,jk->ik")
        return lax.scan(lambda x, _: (jnp.tanh(body(x, jnp.ones((16, 16)) * x[0, 0])), None), x, None, length=LOOPS)[0]

    text, mesh = compiled(run, P("fsdp"), (4 * ROWS, 16), fsdp=4)
    assert census(text, mesh).flops == LOOPS * 2 * ROWS * 16 * 16


def test_loops_that_run_as_often_as_the_data_asks_are_kept_apart():
    def run(x):
        x = lax.while_loop(lambda x: jnp.sum(x) < 100, lambda x: lax.psum(x, "fsdp") @ jnp.ones((16, 16)), x)
        return lax.all_to_all(x, "fsdp", 0, 0, tiled=True)

    text, mesh = compiled(run, P("fsdp"), (4 * ROWS, 16), fsdp=4)
    found = census(text, mesh)
    assert [row.kind for row in found.moved] == ["all-to-all"] and found.flops == 0
    assert [(row.kind, row.times) for row in found.asked_moved] == [("all-reduce", 1)]
    assert found.asked_flops == 2 * ROWS * 16 * 16


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        census("nothing", {"fsdp": 2})
