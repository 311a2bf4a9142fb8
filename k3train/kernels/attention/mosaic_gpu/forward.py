"""Forward kernel: a thread block owns 128 queries of a head and walks over the blocks of keys they see.

Two warpgroups of 64 queries compute, a third one issues copies, ``STAGES`` blocks of keys and values ahead. As in
FlashAttention-3 (arXiv 2407.08608) the two take turns: while one has the tensor cores, the other forms its
probabilities. In a turn a warpgroup starts the scores of the next block and then the sums over values of this one, and
hands on before either is done. Scores stay to base 2 with the scale folded in, so that a probability is one
multiply-add and one exp2. The shared part of the keys is read as it is, once a row, and never expanded to heads.

Blocks that need a mask come first (the one on the diagonal and those at a document's ends), all others after them, so
that one loop has a mask and one has none. The last block has nothing to start and a piece of code of its own, which
masks whether or not it has to.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from k3train.kernels.attention.mosaic_gpu import parts
from k3train.kernels.attention.mosaic_gpu.bounds import BLOCK, Bounds
from k3train.kernels.attention.mosaic_gpu.parts import (
    COLUMN,
    GROUPS,
    LOG2E,
    MASKED,
    OWN,
    ROW,
    ROWS,
    SHARED,
    VALUE,
    WGMMA,
    Operands,
    columns,
    iota,
    rows,
    turned,
)

STAGES = 2
TILE = (ROWS, BLOCK)
OUT = (ROWS, VALUE)


class Found(NamedTuple):
    """What the forward kernel gives."""

    o: jax.Array
    """[B, T, H, V], 0 at padding."""
    log_sum: jax.Array
    """[B, H, T] float32, log2 of the sum of 2^score; ``MASKED`` at padding."""
    top: jax.Array
    """[B, H, T] float32, the greatest score to base 2; ``MASKED`` at padding."""


def forward(given: Operands, bounds: Bounds, scale: float, out_dtype: Any = jnp.float32) -> Found:
    """Launch the kernel.

    Args:
      given: queries, keys and values.
      bounds: of the documents.
      scale: on scores, positive.
      out_dtype: float32 or bfloat16.
    """
    batch, tokens, heads, _ = given.q.shape
    together = parts.heads_together(heads, tokens)

    def mla_forward(*refs, **scratch):
        names = [*Operands._fields, "first", "alike", *Found._fields]
        ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        _body(ref, SimpleNamespace(**scratch), scale * LOG2E, together)

    sums = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    out = plgpu.kernel(
        mla_forward,
        out_type=[jax.ShapeDtypeStruct((batch, tokens, heads, VALUE), out_dtype), sums, sums],
        grid=(batch * heads // together, tokens // BLOCK, together),
        grid_names=("heads", "tile", "head"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types={
            "q": parts.smem(GROUPS, ROWS, OWN),
            "q_shared": parts.smem(GROUPS, ROWS, SHARED),
            "k": parts.smem(STAGES, BLOCK, OWN),
            "shared": parts.smem(STAGES, BLOCK, SHARED),
            "v": parts.smem(STAGES, BLOCK, VALUE),
            "ids": plgpu.SMEM((STAGES, BLOCK), jnp.int32),
            "query_ids": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
            "sums": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            "tops": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=3, num_barriers=GROUPS),
            "k_ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "v_ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            "k_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "v_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
            "turn": plgpu.Barrier(num_arrivals=1, num_barriers=GROUPS),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*given, bounds.first, bounds.alike_from)
    return Found(*out)


def _body(ref, s, scale: float, together: int) -> None:
    group, at = lax.axis_index("group"), parts.place(ref.q.shape[2], together)
    at.tile = ref.q.shape[1] // BLOCK - 1 - at.tile  # the longest first
    at.first, alike = ref.first[at.row, at.tile], ref.alike[at.row, at.tile]
    at.masked, at.steps = alike - at.first + 1, at.tile - at.first + 1

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        _compute(ref, s, at, group, scale)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")
        _fetch(ref, s, at)


def _block(at, n):
    """The n-th block of keys: that on the diagonal, then from the first on."""
    return jnp.where(n == 0, at.tile, at.first + n - 1)


def _fetch(ref, s, at) -> None:
    @pl.loop(0, at.steps)
    def _(n):
        slot = _slot(n)
        here = pl.ds(_block(at, n) * BLOCK, BLOCK)

        @pl.when(n >= STAGES)
        def _():
            plgpu.barrier_wait(s.k_free.at[slot])

        ready = s.k_ready.at[slot]
        plgpu.copy_gmem_to_smem(ref.k.at[at.row, here, at.head], s.k.at[slot], ready)
        plgpu.copy_gmem_to_smem(ref.shared.at[at.row, here], s.shared.at[slot], ready)

        @pl.when(n >= STAGES)
        def _():
            plgpu.barrier_wait(s.v_free.at[slot])

        # Keys are done with before their mask is formed, values are not: so documents come with these.
        plgpu.copy_gmem_to_smem(ref.v.at[at.row, here, at.head], s.v.at[slot], s.v_ready.at[slot])
        plgpu.copy_gmem_to_smem(ref.key_ids.at[at.row, here], s.ids.at[slot], s.v_ready.at[slot])


def _compute(ref, s, at, group, scale: float) -> None:
    base = at.tile * BLOCK + group * ROWS
    here = pl.ds(base, ROWS)
    ready = s.q_ready.at[group]
    q, q_shared = s.q.at[group], s.q_shared.at[group]
    plgpu.copy_gmem_to_smem(ref.q.at[at.row, here, at.head, pl.ds(0, OWN)], q, ready)
    plgpu.copy_gmem_to_smem(ref.q.at[at.row, here, at.head, pl.ds(OWN, SHARED)], q_shared, ready)
    plgpu.copy_gmem_to_smem(ref.query_ids.at[at.row, here], s.query_ids.at[group], ready)
    plgpu.barrier_wait(ready)

    def scores_of(n, accumulator) -> None:
        plgpu.wgmma(accumulator, q, turned(s.k.at[_slot(n)]))
        plgpu.wgmma(accumulator, q_shared, turned(s.shared.at[_slot(n)]))

    def first(accumulator):
        scores_of(jnp.int32(0), accumulator)
        plgpu.barrier_arrive(s.turn.at[1 - group])
        return accumulator[...]

    probabilities = partial(_probabilities, s, at, group, base, scale)

    def step(n, carry, masked: bool):
        acc, top, total, p = probabilities(n, carry, masked)
        plgpu.barrier_wait(s.k_ready.at[_slot(n + 1)])
        plgpu.barrier_wait(s.turn.at[group])

        def products(accumulators):
            scores_of(n + 1, accumulators[1])
            plgpu.wgmma(accumulators[0], p, s.v.at[_slot(n)])
            plgpu.barrier_arrive(s.turn.at[1 - group])

        acc, scores = parts.run(products, acc, parts.zeros(*TILE))
        plgpu.barrier_arrive(s.k_free.at[_slot(n + 1)])
        plgpu.barrier_arrive(s.v_free.at[_slot(n)])
        return acc, top, total, scores

    pl.when(group == 1)(lambda: plgpu.barrier_arrive(s.turn.at[0]))
    plgpu.barrier_wait(s.k_ready.at[0])
    plgpu.barrier_wait(s.turn.at[group])
    scores = pl.run_scoped(first, plgpu.WGMMAAccumulatorRef(TILE, jnp.float32))
    plgpu.barrier_arrive(s.k_free.at[0])
    row = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)  # noqa: E731
    carry = parts.zeros(*OUT), row(MASKED), row(0.0), scores
    last = at.steps - 1
    masked = jnp.minimum(at.masked, last)
    carry = lax.fori_loop(0, masked, lambda n, c: step(n, c, True), carry)
    carry = lax.fori_loop(masked, last, lambda n, c: step(n, c, False), carry)
    acc, top, total, p = probabilities(last, carry, True)
    plgpu.barrier_wait(s.turn.at[group])

    def products(accumulators):
        plgpu.wgmma(accumulators[0], p, s.v.at[_slot(last)])
        plgpu.barrier_arrive(s.turn.at[1 - group])

    (acc,) = parts.run(products, acc)
    _put(ref, s, at, group, here, acc, top, total)


def _probabilities(s, at, group, base, scale: float, n, carry, masked: bool):
    """What the scores of the n-th block make of the sums, and what its values are to be multiplied with."""
    acc, top, total, scores = carry
    if masked:
        plgpu.barrier_wait(s.v_ready.at[_slot(n)])
        scores = _mask(s, at, scores, group, base, n)
    new = jnp.maximum(top, jnp.max(scores, axis=1) * scale)
    shrink = jnp.exp2(top - new)
    p = jnp.exp2(scores * scale - rows(new, TILE))
    total = total * shrink + jnp.sum(p, axis=1)
    if not masked:
        plgpu.barrier_wait(s.v_ready.at[_slot(n)])
    return lax.optimization_barrier((acc * rows(shrink, OUT), new, total, p.astype(jnp.bfloat16)))


def _slot(n):
    """Where the n-th block lies in shared memory."""
    return lax.rem(n, jnp.int32(STAGES))


def _mask(s, at, scores: jax.Array, group, base, n) -> jax.Array:
    """-inf where the key comes later or is of another document."""
    mine = plgpu.load(s.query_ids.at[group], layout=ROW)
    theirs = plgpu.load(s.ids.at[_slot(n)], layout=COLUMN)
    same = rows(mine, TILE) == columns(theirs, TILE)
    seen = iota(TILE, 0) + base >= iota(TILE, 1) + _block(at, n) * BLOCK
    return jnp.where(same & seen, scores, -jnp.inf)


def _put(ref, s, at, group, here, acc: jax.Array, top: jax.Array, total: jax.Array) -> None:
    """Outputs and sums to global memory."""
    total = jnp.where(total > 0, total, 1.0)
    o = acc * rows(1.0 / total, OUT)
    s.sums.at[group][...] = top + jnp.log(total) * LOG2E
    s.tops.at[group][...] = top
    if ref.o.dtype == jnp.bfloat16:
        s.q.at[group][...] = o.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.sums.at[group], ref.log_sum.at[at.row, at.head, here])
    plgpu.copy_smem_to_gmem(s.tops.at[group], ref.top.at[at.row, at.head, here])
    if ref.o.dtype == jnp.bfloat16:
        plgpu.copy_smem_to_gmem(s.q.at[group], ref.o.at[at.row, here, at.head])
    else:  # a quarter of a warp writes a whole sector of 32 bytes; shared memory has no room for the tile
        ref.o.at[at.row, here, at.head][...] = plgpu.layout_cast(o, WGMMA)
    plgpu.wait_smem_to_gmem(0)
