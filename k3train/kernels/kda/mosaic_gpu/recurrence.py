"""Second and third kernel: the state through a row's chunks, and its gradient back through them.

The transposed state S^T (value channels as rows) stays in the accumulators of the tensor cores, 64 value channels a
warpgroup, so that every product takes its left operand from registers: D^T = U^T - S^T W^T,
O^T = S^T (e^G q)^T + D^T P^T, S^T <- S^T e^G_C + D^T (e^(G_C - G) k). One more warpgroup only issues copies, ``STAGES``
chunks ahead. A block owns one head of one row, or half of its value channels where heads and rows alone do not fill the
card.

States are float32; a chunk's is rounded to bfloat16 for the products and where it is written out. D and the gradients
take the same rounding.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from k3train.kernels.kda.mosaic_gpu import parts
from k3train.kernels.kda.mosaic_gpu.intra import Factors
from k3train.kernels.kda.mosaic_gpu.parts import CHUNK, HALF, WIDTH, columns, load, transposed

STAGES = 2
STATE = (HALF, WIDTH)
MULTIPROCESSORS = 132
TURNED = plgpu.Layout.WGMMA_TRANSPOSED


def value_groups(blocks: int) -> int:
    """Warpgroups that share a block's value channels: both halves in one block, or one each in two."""
    return 2 if 2 * blocks > MULTIPROCESSORS else 1


def outputs(factors: Factors, state: jax.Array, groups: int | None = None) -> tuple[jax.Array, jax.Array]:
    """o [B, T, H, V] bfloat16 and the last state.

    Args:
      factors: of all chunks.
      state: S^T before the row, [B, H, V, K] float32.
      groups: see :func:`value_groups`, which is asked where None.
    """
    batch, tokens, heads, _ = factors.u.shape
    inputs = {name: getattr(factors, name) for name in ("minus_w", "u", "k", "q", "scores", "decay")}
    out = {
        "values": jax.ShapeDtypeStruct((batch, tokens, heads, WIDTH), jnp.bfloat16),
        "end": jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), jnp.float32),
    }
    return tuple(_launch("kda_recurrence", _forward_step, inputs, state, out, groups))


def states(factors: Factors, state: jax.Array, groups: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """D [B, T, H, V] and the state before every chunk, [B, N, H, V, K], both bfloat16, and the last state.

    Arguments as in :func:`outputs`.
    """
    batch, tokens, heads, _ = factors.u.shape
    inputs = {name: getattr(factors, name) for name in ("minus_w", "u", "k", "decay")}
    out = {
        "values": jax.ShapeDtypeStruct((batch, tokens, heads, WIDTH), jnp.bfloat16),
        "kept": jax.ShapeDtypeStruct((batch, tokens // CHUNK, heads, WIDTH, WIDTH), jnp.bfloat16),
        "end": jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), jnp.float32),
    }
    return tuple(_launch("kda_states", _states_step, inputs, state, out, groups))


def reverse(
    factors: Factors, d_o: jax.Array, d_state: jax.Array, groups: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of D [B, T, H, V] and of the state after every chunk [B, N, H, V, K] (bfloat16), of the first state.

    Args:
      factors: of all chunks.
      d_o: [B, T, H, V] bfloat16.
      d_state: gradient of the last S^T, [B, H, V, K] float32.
      groups: see :func:`value_groups`.
    """
    batch, tokens, heads, _ = d_o.shape
    inputs = {name: getattr(factors, name) for name in ("minus_w", "k", "q", "scores", "decay")} | {"u": d_o}
    out = {
        "values": jax.ShapeDtypeStruct((batch, tokens, heads, WIDTH), jnp.bfloat16),
        "kept": jax.ShapeDtypeStruct((batch, tokens // CHUNK, heads, WIDTH, WIDTH), jnp.bfloat16),
        "end": jax.ShapeDtypeStruct((batch, heads, WIDTH, WIDTH), jnp.float32),
    }
    return tuple(_launch("kda_reverse", _reverse_step, inputs, d_state, out, groups))


def end(factors: Factors, state: jax.Array, groups: int | None = None) -> jax.Array:
    """The last state alone; arguments as in :func:`outputs`."""
    inputs = {name: getattr(factors, name) for name in ("minus_w", "u", "k", "decay")}
    return _launch("kda_end", _end_step, inputs, state, {"end": _like(state)}, groups)[0]


def transition(factors: Factors, groups: int | None = None) -> jax.Array:
    """M^T [B, H, K, K] float32, by which S^T before the row is multiplied from the right on its way to the row's end.

    Arguments as in :func:`outputs`.
    """
    batch, _, heads, _ = factors.u.shape
    one = jnp.broadcast_to(jnp.eye(WIDTH, dtype=jnp.float32), (batch, heads, WIDTH, WIDTH))
    inputs = {name: getattr(factors, name) for name in ("minus_w", "k", "decay")}
    return _launch("kda_transition", _transition_step, inputs, one, {"end": _like(one)}, groups)[0]


def reverse_end(factors: Factors, d_o: jax.Array, d_state: jax.Array, groups: int | None = None) -> jax.Array:
    """The gradient of the first state alone; arguments as in :func:`reverse`."""
    inputs = {name: getattr(factors, name) for name in ("minus_w", "k", "q", "scores", "decay")} | {"u": d_o}
    return _launch("kda_reverse_end", _reverse_end_step, inputs, d_state, {"end": _like(d_state)}, groups)[0]


def _like(state: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(state.shape, jnp.float32)


def _launch(kernel_name: str, step, inputs: dict[str, jax.Array], start: jax.Array, out: dict, groups: int | None):
    batch, tokens, heads, width = inputs["minus_w"].shape
    count = tokens // CHUNK
    groups = value_groups(batch * heads) if groups is None else groups

    def body(*refs, **scratch):
        ref = SimpleNamespace(**dict(zip([*inputs, "start", *out], refs, strict=True)))
        _body(step, ref, SimpleNamespace(**scratch), list(inputs), count, groups)

    body.__name__ = kernel_name
    token = lambda: parts.smem(STAGES, CHUNK, WIDTH)  # noqa: E731
    shared = {
        "minus_w": token(),
        "k": token(),
        "q": token(),
        "u": parts.smem(STAGES, groups, CHUNK, HALF),
        "scores": parts.smem(STAGES, CHUNK, CHUNK),
        "decay": plgpu.SMEM((STAGES, width), jnp.float32),
    }
    copies = len(inputs) + (groups - 1 if "u" in inputs else 0)
    return plgpu.kernel(
        body,
        out_type=list(out.values()),
        grid=(WIDTH // (HALF * groups), heads, batch),
        grid_names=("value", "head", "row"),
        num_threads=groups + 1,
        thread_name="group",
        scratch_types={
            **{f"{name}_in": shared[name] for name in inputs},
            **({"values_out": parts.smem(groups, 2, CHUNK, HALF)} if "values" in out else {}),
            **({"kept_out": parts.smem(groups, HALF, WIDTH)} if "kept" in out else {}),
            "ready": plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            "free": plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
        },
        compiler_params=parts.compiler_params(),
    )(*inputs.values(), start)


def _body(step, ref, s, names: list[str], count: int, groups: int) -> None:
    head, row, group = (lax.axis_index(name) for name in ("head", "row", "group"))
    first = lax.axis_index("value") * (groups * HALF)
    backward = step in (_reverse_step, _reverse_end_step)

    def chunk_of(n):
        return count - 1 - n if backward else n

    @pl.when(group < groups)
    def _():
        plgpu.set_max_registers(240, action="increase")
        channels = pl.ds(first + group * HALF, HALF)

        def loop(n, state):
            chunk = chunk_of(n)
            at = SimpleNamespace(
                slot=lax.rem(n, jnp.int32(STAGES)),
                out=lax.rem(n, jnp.int32(2)),
                group=group,
                kept=(row, chunk, head, channels),
                values=(row, pl.ds(chunk * CHUNK, CHUNK), head, channels),
            )
            return step(ref, s, at, state)

        start = plgpu.load(ref.start.at[row, head, channels], layout=parts.WGMMA, optimized=False)
        state = lax.fori_loop(0, count, loop, start)
        ref.end.at[row, head, channels][...] = state
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(group == groups)
    def _():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, count)
        def _(n):
            chunk, slot = chunk_of(n), lax.rem(n, jnp.int32(STAGES))

            @pl.when(n >= STAGES)
            def _():
                plgpu.barrier_wait(s.free.at[slot])

            here = (row, pl.ds(chunk * CHUNK, CHUNK), head)
            for name in names:
                source, target = getattr(ref, name), getattr(s, f"{name}_in").at[slot]
                if name == "u":
                    for i in range(groups):
                        half = source.at[*here, pl.ds(first + i * HALF, HALF)]
                        plgpu.copy_gmem_to_smem(half, target.at[i], s.ready.at[slot])
                elif name in ("scores", "decay"):
                    plgpu.copy_gmem_to_smem(source.at[row, chunk, head], target, s.ready.at[slot])
                else:
                    plgpu.copy_gmem_to_smem(source.at[here], target, s.ready.at[slot])


def _keep(ref, s, at, state: jax.Array) -> None:
    """A state in bfloat16 to global memory."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    s.kept_out.at[at.group][...] = state
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.kept_out.at[at.group], ref.kept.at[at.kept])


def _put_values(ref, s, at, values: jax.Array) -> None:
    """A transposed bfloat16 tile [64 channels, 64 tokens] to its tokens in global memory."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    turned = transposed(s.values_out.at[at.group, at.out])
    turned[...] = plgpu.layout_cast(values, TURNED)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.values_out.at[at.group, at.out], ref.values.at[at.values])


def _turned(s, at) -> jax.Array:
    """This warpgroup's value channels of U (or of the gradient of o), transposed."""
    return parts.load_turned(s.u_in.at[at.slot, at.group])


def _written(s, at, state: jax.Array) -> jax.Array:
    """D^T of a chunk in bfloat16, from the rounded state before it."""
    u = _turned(s, at).astype(jnp.float32)
    w = transposed(s.minus_w_in.at[at.slot])
    return parts.dot_onto(u, (state, lambda: w)).astype(jnp.bfloat16)


def _decayed(s, at, state: jax.Array) -> jax.Array:
    return state * columns(load(s.decay_in.at[at.slot], parts.COLUMN), STATE)


def _forward_step(ref, s, at, state: jax.Array) -> jax.Array:
    narrow = state.astype(jnp.bfloat16)
    plgpu.barrier_wait(s.ready.at[at.slot])
    written = _written(s, at, narrow)

    def products(accumulators):
        end, o = accumulators
        plgpu.wgmma(end, written, s.k_in.at[at.slot])
        plgpu.wgmma(o, narrow, transposed(s.q_in.at[at.slot]))
        plgpu.wgmma(o, written, transposed(s.scores_in.at[at.slot]))

    start = plgpu.WGMMAAccumulatorRef.init(_decayed(s, at, state)), plgpu.WGMMAAccumulatorRef.init(parts.zeros())
    run: Any = pl.run_state(products)
    state, o = run(start)
    plgpu.barrier_arrive(s.free.at[at.slot])
    _put_values(ref, s, at, o.astype(jnp.bfloat16))
    return state


def _states_step(ref, s, at, state: jax.Array) -> jax.Array:
    narrow = state.astype(jnp.bfloat16)
    _keep(ref, s, at, narrow)
    plgpu.barrier_wait(s.ready.at[at.slot])
    written = _written(s, at, narrow)
    state = parts.dot_onto(_decayed(s, at, state), (written, lambda: s.k_in.at[at.slot]))
    plgpu.barrier_arrive(s.free.at[at.slot])
    _put_values(ref, s, at, written)
    return state


def _end_step(ref, s, at, state: jax.Array) -> jax.Array:
    plgpu.barrier_wait(s.ready.at[at.slot])
    written = _written(s, at, state.astype(jnp.bfloat16))
    state = parts.dot_onto(_decayed(s, at, state), (written, lambda: s.k_in.at[at.slot]))
    plgpu.barrier_arrive(s.free.at[at.slot])
    return state


def _transition_step(ref, s, at, state: jax.Array) -> jax.Array:
    plgpu.barrier_wait(s.ready.at[at.slot])
    written = parts.dot((state.astype(jnp.bfloat16), transposed(s.minus_w_in.at[at.slot]))).astype(jnp.bfloat16)
    state = parts.dot_onto(_decayed(s, at, state), (written, lambda: s.k_in.at[at.slot]))
    plgpu.barrier_arrive(s.free.at[at.slot])
    return state


def _reverse_products(s, at, d_state: jax.Array, narrow: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of D^T and of the state before the chunk; its buffers are free afterwards."""
    d_o = _turned(s, at)
    k = transposed(s.k_in.at[at.slot])
    d_written = parts.dot((d_o, s.scores_in.at[at.slot]), (narrow, k)).astype(jnp.bfloat16)
    d_state = parts.dot_onto(
        _decayed(s, at, d_state),
        (d_o, lambda: s.q_in.at[at.slot]),
        (d_written, lambda: s.minus_w_in.at[at.slot]),
    )
    plgpu.barrier_arrive(s.free.at[at.slot])
    return d_written, d_state


def _reverse_step(ref, s, at, d_state: jax.Array) -> jax.Array:
    narrow = d_state.astype(jnp.bfloat16)
    _keep(ref, s, at, narrow)
    plgpu.barrier_wait(s.ready.at[at.slot])
    d_written, d_state = _reverse_products(s, at, d_state, narrow)
    _put_values(ref, s, at, d_written)
    return d_state


def _reverse_end_step(ref, s, at, d_state: jax.Array) -> jax.Array:
    plgpu.barrier_wait(s.ready.at[at.slot])
    return _reverse_products(s, at, d_state, d_state.astype(jnp.bfloat16))[1]
