"""Backward kernels: one for the gradient of queries, one for those of keys and values.

Each owns 128 tokens of a head, 64 a warpgroup, and walks over the other side in blocks of 64; a third warpgroup issues
copies ahead. Scores are formed in both, seven products in all against five of a kernel that adds gradients of queries
up across thread blocks, but nothing sums in an order that may change: the same inputs give the same bits. Scores are to
base 2 as in the forward kernel, whose log-sums make probabilities of them at once. Blocks that need a mask come first.

The gradient of the shared keys is written by head; their sum is left to XLA.
"""

from types import SimpleNamespace
from typing import Any

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

STAGES = 3
STEP = 64
"""Tokens of the other side in a step."""
TILE = (ROWS, STEP)
FINER = BLOCK // STEP


def queries(
    given: Operands, bounds: Bounds, do: jax.Array, log_sum: jax.Array, delta: jax.Array, scale: float
) -> jax.Array:
    """The gradient of q, [B, T, H, N + R] bfloat16.

    Args:
      given: queries, keys and values.
      bounds: of the documents.
      do: [B, T, H, V] bfloat16.
      log_sum: the forward kernel's.
      delta: [B, H, T] float32, sums of do * o.
      scale: on scores.
    """

    def mla_queries(*refs, **scratch):
        names = [*Operands._fields, "do", "log_sum", "delta", "first", "alike", "dq"]
        _body(_Queries, dict(zip(names, refs, strict=True)), scratch, scale, together)

    together = parts.heads_together(given.q.shape[2], given.q.shape[1])
    scratch = {
        "q": parts.smem(GROUPS, ROWS, OWN),
        "q_shared": parts.smem(GROUPS, ROWS, SHARED),
        "do": parts.smem(GROUPS, ROWS, VALUE),
        "log_sum": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "delta": plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        "query_ids": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        "k": parts.smem(STAGES, STEP, OWN),
        "shared": parts.smem(STAGES, STEP, SHARED),
        "v": parts.smem(STAGES, STEP, VALUE),
        "key_ids": plgpu.SMEM((STAGES, STEP), jnp.int32),
        **_barriers(own=6, scores=3, values=1),
    }
    inputs = (*given, do, log_sum, delta, bounds.first, bounds.alike_from)
    return _launch(mla_queries, [given.q], scratch, together, given, inputs)[0]


def keys(
    given: Operands, bounds: Bounds, do: jax.Array, log_sum: jax.Array, delta: jax.Array, scale: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of k [B, T, H, N], of the shared part by head [B, T, H, R] and of v [B, T, H, V], bfloat16.

    Arguments as in :func:`queries`.
    """

    def mla_keys(*refs, **scratch):
        names = [*Operands._fields, "do", "log_sum", "delta", "alike", "last", "dk", "dshared", "dv"]
        _body(_Keys, dict(zip(names, refs, strict=True)), scratch, scale, together)

    together = parts.heads_together(given.q.shape[2], given.q.shape[1])
    scratch = {
        "k": parts.smem(GROUPS, ROWS, OWN),
        "shared": parts.smem(GROUPS, ROWS, SHARED),
        "v": parts.smem(GROUPS, ROWS, VALUE),
        "key_ids": plgpu.SMEM((GROUPS, ROWS), jnp.int32),
        "q": parts.smem(STAGES, STEP, OWN),
        "q_shared": parts.smem(STAGES, STEP, SHARED),
        "do": parts.smem(STAGES, STEP, VALUE),
        "log_sum": plgpu.SMEM((STAGES, STEP), jnp.float32),
        "delta": plgpu.SMEM((STAGES, STEP), jnp.float32),
        "query_ids": plgpu.SMEM((STAGES, STEP), jnp.int32),
        "p": parts.smem(GROUPS, ROWS, STEP),
        **_barriers(own=4, scores=4, values=2),
    }
    inputs = (*given, do, log_sum, delta, bounds.alike_until, bounds.last)
    shared = jax.ShapeDtypeStruct((*given.k.shape[:-1], SHARED), jnp.bfloat16)
    dk, d_shared, dv = _launch(mla_keys, [given.k, shared, given.v], scratch, together, given, inputs)
    return dk, d_shared, dv


def _barriers(own: int, scores: int, values: int) -> dict[str, Any]:
    """Of the tile a warpgroup owns and of what a step's scores and values take, by the copies each waits for."""
    return {
        "own_ready": plgpu.Barrier(num_arrivals=own, num_barriers=GROUPS),
        "scores_ready": plgpu.Barrier(num_arrivals=scores, num_barriers=STAGES),
        "values_ready": plgpu.Barrier(num_arrivals=values, num_barriers=STAGES),
        "scores_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        "values_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
    }


def _launch(body, out, scratch: dict[str, Any], together: int, given: Operands, inputs) -> list[jax.Array]:
    batch, tokens, heads, _ = given.q.shape
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in out],
        grid=(batch * heads // together, tokens // BLOCK, together),
        grid_names=("heads", "tile", "head"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs)


def _body(side, refs: dict[str, Any], scratch: dict[str, Any], scale: float, together: int) -> None:
    ref, s, group = SimpleNamespace(**refs), SimpleNamespace(**scratch), lax.axis_index("group")
    at = side.place(ref, parts.place(ref.q.shape[2], together))

    @pl.when(group < GROUPS)
    def _():
        plgpu.set_max_registers(240, action="increase")
        side.compute(ref, s, at, group, scale)

    @pl.when(group == GROUPS)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, at.steps)
        def _(n):
            slot, here = lax.rem(n, jnp.int32(STAGES)), pl.ds(at.block(n) * STEP, STEP)
            for free, ready, copies in (
                (s.scores_free, s.scores_ready, side.for_scores),
                (s.values_free, s.values_ready, side.for_values),
            ):
                pl.when(n >= STAGES)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                for source, target in copies(ref, s, at, here, slot):
                    plgpu.copy_gmem_to_smem(source, target, ready.at[slot])


def _query_copies(ref, s, at, here, i) -> list:
    """What scores take of some queries."""
    return [
        (ref.q.at[at.row, here, at.head, pl.ds(0, OWN)], s.q.at[i]),
        (ref.q.at[at.row, here, at.head, pl.ds(OWN, SHARED)], s.q_shared.at[i]),
        (ref.log_sum.at[at.row, at.head, here], s.log_sum.at[i]),
        (ref.query_ids.at[at.row, here], s.query_ids.at[i]),
    ]


def _output_copies(ref, s, at, here, i) -> list:
    """What the gradients of probabilities take of some queries."""
    return [
        (ref.do.at[at.row, here, at.head], s.do.at[i]),
        (ref.delta.at[at.row, at.head, here], s.delta.at[i]),
    ]


def _key_copies(ref, s, at, here, i) -> list:
    """What scores take of some keys."""
    return [
        (ref.k.at[at.row, here, at.head], s.k.at[i]),
        (ref.shared.at[at.row, here], s.shared.at[i]),
        (ref.key_ids.at[at.row, here], s.key_ids.at[i]),
    ]


def _value_copies(ref, s, at, here, i) -> list:
    return [(ref.v.at[at.row, here, at.head], s.v.at[i])]


def _own(copies: list, ready) -> None:
    """Fetch a warpgroup's own tile."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, ready)
    plgpu.barrier_wait(ready)


class _Queries:
    """Own queries, steps over keys."""

    for_scores, for_values = staticmethod(_key_copies), staticmethod(_value_copies)

    @staticmethod
    def place(ref, at):
        tile = ref.q.shape[1] // BLOCK - 1 - at.tile  # the longest first
        first, alike = ref.first[at.row, tile], ref.alike[at.row, tile]
        at.tile, at.masked, at.steps = tile, FINER * (alike - first + 1), FINER * (tile - first + 1)
        at.block = lambda n: jnp.where(n < FINER, FINER * tile + n, FINER * (first - 1) + n)
        return at

    @staticmethod
    def compute(ref, s, at, group, scale: float) -> None:
        base = at.tile * BLOCK + group * ROWS
        here = pl.ds(base, ROWS)
        _own(_query_copies(ref, s, at, here, group) + _output_copies(ref, s, at, here, group), s.own_ready.at[group])
        q, q_shared, do = s.q.at[group], s.q_shared.at[group], s.do.at[group]
        log_sum = plgpu.load(s.log_sum.at[group], layout=ROW)
        delta = plgpu.load(s.delta.at[group], layout=ROW)

        def step(n, carry, masked: bool):
            slot = lax.rem(n, jnp.int32(STAGES))
            plgpu.barrier_wait(s.scores_ready.at[slot])
            plgpu.barrier_wait(s.values_ready.at[slot])

            def products(scores, dp):
                plgpu.wgmma(scores, q, turned(s.k.at[slot]))
                plgpu.wgmma(scores, q_shared, turned(s.shared.at[slot]))
                plgpu.wgmma(dp, do, turned(s.v.at[slot]))
                return scores[...], dp[...]

            scores, dp = pl.run_scoped(products, *(plgpu.WGMMAAccumulatorRef(TILE, jnp.float32) for _ in range(2)))
            plgpu.barrier_arrive(s.values_free.at[slot])
            if masked:
                mine = plgpu.load(s.query_ids.at[group], layout=ROW)
                theirs = plgpu.load(s.key_ids.at[slot], layout=COLUMN)
                seen = iota(TILE, 0) + base >= iota(TILE, 1) + at.block(n) * STEP
                scores = jnp.where((rows(mine, TILE) == columns(theirs, TILE)) & seen, scores, -jnp.inf)
            p = jnp.exp2(scores * (scale * LOG2E) - rows(log_sum, TILE))
            ds = (p * (dp - rows(delta, TILE))).astype(jnp.bfloat16)

            def gradients(accumulators):
                plgpu.wgmma(accumulators[0], ds, s.k.at[slot])
                plgpu.wgmma(accumulators[1], ds, s.shared.at[slot])

            carry = parts.run(gradients, *carry)
            plgpu.barrier_arrive(s.scores_free.at[slot])
            return carry

        carry = parts.zeros(ROWS, OWN), parts.zeros(ROWS, SHARED)
        carry = lax.fori_loop(0, at.masked, lambda n, c: step(n, c, True), carry)
        own, shared = lax.fori_loop(at.masked, at.steps, lambda n, c: step(n, c, False), carry)
        q[...] = (own * scale).astype(jnp.bfloat16)
        q_shared[...] = (shared * scale).astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, ref.dq.at[at.row, here, at.head, pl.ds(0, OWN)])
        plgpu.copy_smem_to_gmem(q_shared, ref.dq.at[at.row, here, at.head, pl.ds(OWN, SHARED)])
        plgpu.wait_smem_to_gmem(0)


class _Keys:
    """Own keys and values, steps over queries; tiles are [keys, queries]."""

    for_scores, for_values = staticmethod(_query_copies), staticmethod(_output_copies)

    @staticmethod
    def place(ref, at):
        tile, until, last = at.tile, ref.alike[at.row, at.tile], ref.last[at.row, at.tile]
        at.masked, at.steps = FINER * (last - until + 1), FINER * (last - tile)

        def block(n):
            early = jnp.where(n < FINER, FINER * tile + n, FINER * (until - 1) + n)
            return jnp.where(n < at.masked, early, FINER * (tile + 1) + n - at.masked)

        at.block = block
        return at

    @staticmethod
    def compute(ref, s, at, group, scale: float) -> None:
        base = at.tile * BLOCK + group * ROWS
        here = pl.ds(base, ROWS)
        _own(_key_copies(ref, s, at, here, group) + _value_copies(ref, s, at, here, group), s.own_ready.at[group])
        k, shared, v = s.k.at[group], s.shared.at[group], s.v.at[group]

        def step(n, carry, masked: bool):
            dk, d_shared, dv = carry
            slot = lax.rem(n, jnp.int32(STAGES))
            plgpu.barrier_wait(s.scores_ready.at[slot])
            # Sums that are subtracted later on go into the accumulators first, and so take no registers then.
            log_sum = plgpu.load(s.log_sum.at[slot], layout=COLUMN) * (-1.0 / (scale * LOG2E))

            def products(accumulators):
                plgpu.wgmma(accumulators[0], k, turned(s.q.at[slot]))
                plgpu.wgmma(accumulators[0], shared, turned(s.q_shared.at[slot]))

            (scores,) = parts.run(products, columns(log_sum, TILE))
            if masked:
                mine = plgpu.load(s.key_ids.at[group], layout=ROW)
                theirs = plgpu.load(s.query_ids.at[slot], layout=COLUMN)
                seen = iota(TILE, 1) + at.block(n) * STEP >= iota(TILE, 0) + base
                scores = jnp.where((rows(mine, TILE) == columns(theirs, TILE)) & seen, scores, -jnp.inf)
            p = jnp.exp2(scores * (scale * LOG2E)).astype(jnp.bfloat16)
            s.p.at[group][...] = p  # kept there while dp takes the registers
            plgpu.barrier_wait(s.values_ready.at[slot])
            delta = -plgpu.load(s.delta.at[slot], layout=COLUMN)

            def values(accumulators):
                plgpu.wgmma(accumulators[0], p, s.do.at[slot])
                plgpu.wgmma(accumulators[1], v, turned(s.do.at[slot]))

            dv, dp = parts.run(values, dv, columns(delta, TILE))
            plgpu.barrier_arrive(s.values_free.at[slot])
            ds = (plgpu.load(s.p.at[group], layout=WGMMA).astype(jnp.float32) * dp).astype(jnp.bfloat16)

            def gradients(accumulators):
                plgpu.wgmma(accumulators[0], ds, s.q.at[slot])
                plgpu.wgmma(accumulators[1], ds, s.q_shared.at[slot])

            carry = *parts.run(gradients, dk, d_shared), dv
            plgpu.barrier_arrive(s.scores_free.at[slot])
            return carry

        carry = parts.zeros(ROWS, OWN), parts.zeros(ROWS, SHARED), parts.zeros(ROWS, VALUE)
        carry = lax.fori_loop(0, at.masked, lambda n, c: step(n, c, True), carry)
        dk, d_shared, dv = lax.fori_loop(at.masked, at.steps, lambda n, c: step(n, c, False), carry)
        k[...] = (dk * scale).astype(jnp.bfloat16)
        shared[...] = (d_shared * scale).astype(jnp.bfloat16)
        v[...] = dv.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for source, target in ((k, ref.dk), (shared, ref.dshared), (v, ref.dv)):
            plgpu.copy_smem_to_gmem(source, target.at[at.row, here, at.head])
        plgpu.wait_smem_to_gmem(0)
