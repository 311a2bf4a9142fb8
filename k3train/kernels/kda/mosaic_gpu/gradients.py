"""Fourth kernel: every gradient of a chunk that does not go through the recurrence, two warpgroups a chunk and head.

From the states before and the gradients of the states after every chunk, D and its gradient (``recurrence.py``), with
R = beta v - beta e^G k S and D = X R: dR = X^T dD, dA = -dR D^T, dP = dO D^T, and the formulas of ``chunked.py``. Each
warpgroup owns half of the channels: of the values for dR, of the keys for everything else.

The gradient of a log-decay is a sum over all pairs of tokens on its two sides, small against what single tokens say.
Three things keep it to the precision of its terms although the products' operands are bfloat16: the diagonal of P,
which no decay touches, stays out of those sums; a pair's two ends multiply by the same rounded operands, so what must
cancel does; and sums run over the tokens between a token and its reference only (``parts.py``), as the exponents' do.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from k3train.kernels.kda.mosaic_gpu import parts
from k3train.kernels.kda.mosaic_gpu.intra import Raw
from k3train.kernels.kda.mosaic_gpu.parts import CHUNK, HALF, Form, columns, dot, load, rows, transposed


class Passed(NamedTuple):
    """What the other kernels of the backward pass leave."""

    inverse: jax.Array
    """X [B, N, H, 64, 64] bfloat16."""
    states: jax.Array
    """S^T before every chunk, [B, N, H, V, K] bfloat16."""
    d_states: jax.Array
    """Gradient of S^T after every chunk."""
    written: jax.Array
    """D [B, T, H, V] bfloat16."""
    d_written: jax.Array
    d_o: jax.Array


class Grads(NamedTuple):
    """Gradients of :class:`~k3train.kernels.kda.mosaic_gpu.intra.Raw`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    """[B, T, H, 128] bfloat16."""
    gate: jax.Array
    """Of the raw gate input, bfloat16; of a given log-decay (natural), float32."""
    beta: jax.Array
    """[B, H, T] float32."""


def gradients(form: Form, raw: Raw, passed: Passed) -> Grads:
    """Launch the kernel."""
    batch, tokens, heads, width = raw.q.shape
    chunks = tokens // CHUNK
    given = form.gate == "given"
    halved = raw._replace(rate=raw.rate.reshape(heads, 2, HALF), bias=raw.bias.reshape(heads, 2, HALF))
    inputs = {name: x for name, x in {**halved._asdict(), **passed._asdict()}.items() if x is not None}

    def kda_gradients(*refs, **scratch):
        ref = SimpleNamespace(**dict(zip([*inputs, "tables"], refs, strict=False)))
        out = SimpleNamespace(**dict(zip(Grads._fields, refs[len(inputs) + 1 :], strict=True)))
        _body(form, ref, out, SimpleNamespace(**scratch))

    token = jax.ShapeDtypeStruct((batch, tokens, heads, width), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct(token.shape, jnp.float32 if given else jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((batch, heads, tokens), jnp.float32)
    vectors = lambda n: plgpu.SMEM((n, CHUNK), jnp.float32)  # noqa: E731
    out = plgpu.kernel(
        kda_gradients,
        out_type=[token, token, token, gate, beta],
        grid=(chunks, heads, batch),
        grid_names=("chunk", "head", "row"),
        num_threads=2,
        thread_name="group",
        scratch_types={
            **{name: parts.smem(2, CHUNK, HALF) for name in ("q", "k", "v", "g", "high", "written")},
            **{name: parts.smem(2, 2, CHUNK, HALF) for name in ("left", "states", "d_states")},
            "pairs": parts.smem(2, CHUNK, CHUNK),
            "until": parts.smem(CHUNK, CHUNK),
            "codes": plgpu.SMEM((CHUNK,), jnp.int32),
            "codes_again": plgpu.SMEM((CHUNK,), jnp.int32),  # one load serves one layout
            **{name: vectors(2) for name in ("rate", "bias", "on_self", "q_sum", "k_sum", "beta_sum")},
            "beta": plgpu.SMEM((CHUNK,), jnp.float32),
            "scores_ready": plgpu.Barrier(num_arrivals=12),
            "ready": plgpu.Barrier(num_arrivals=17),
            "exponents_ready": plgpu.Barrier(num_arrivals=1, num_barriers=2),
            "met": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=parts.compiler_params(sums_over_rows=False),
    )(*inputs.values(), parts.tables(form.backward_block()))
    return Grads(*out)


class Place(NamedTuple):
    """Where a warpgroup works."""

    chunk: jax.Array
    head: jax.Array
    row: jax.Array
    group: jax.Array

    def token(self, x):
        """This warpgroup's channels of the chunk's tokens."""
        return x.at[self.row, pl.ds(self.chunk * CHUNK, CHUNK), self.head, pl.ds(self.group * HALF, HALF)]

    def whole(self, x):
        """Something a chunk has one of."""
        return x.at[self.row, self.chunk, self.head]


class Tokens(NamedTuple):
    """A chunk's tokens, one value each."""

    valid: jax.Array
    head: jax.Array
    tail: jax.Array
    beta: jax.Array
    unit_q: jax.Array
    unit_k: jax.Array
    """1 / |q| and 1 / |k|; of no meaning where they are taken as they are."""


def _fetch(form: Form, ref, s, at: Place) -> None:
    """Start all copies: first what the scores' gradients take, then the rest. Each warpgroup brings its half."""
    group, ready = at.group, s.scores_ready
    here = pl.ds(at.chunk * CHUNK, CHUNK)
    plgpu.copy_gmem_to_smem(at.token(ref.d_written), s.left.at[1, group], ready)
    plgpu.copy_gmem_to_smem(at.token(ref.v), s.v.at[group], ready)
    plgpu.copy_gmem_to_smem(at.token(ref.d_o), s.left.at[0, group], ready)
    plgpu.copy_gmem_to_smem(at.token(ref.written), s.written.at[group], ready)

    @pl.when(group == 0)
    def _():
        plgpu.copy_gmem_to_smem(at.whole(ref.inverse), s.pairs.at[0], ready)
        plgpu.copy_gmem_to_smem(ref.beta.at[at.row, at.head, here], s.beta, ready)
        plgpu.copy_gmem_to_smem(ref.codes.at[at.row, here], s.codes, ready)
        plgpu.copy_gmem_to_smem(ref.codes.at[at.row, here], s.codes_again, ready)
        plgpu.copy_gmem_to_smem(ref.tables.at[parts.UNTIL], s.until, s.ready)

    for half in range(2):
        tile = pl.ds(half * HALF, HALF), pl.ds(group * HALF, HALF)
        plgpu.copy_gmem_to_smem(at.whole(ref.states).at[tile], s.states.at[group, half], s.ready)
        plgpu.copy_gmem_to_smem(at.whole(ref.d_states).at[tile], s.d_states.at[group, half], s.ready)
    plgpu.copy_gmem_to_smem(at.token(ref.q), s.q.at[group], s.ready)
    plgpu.copy_gmem_to_smem(at.token(ref.k), s.k.at[group], s.ready)
    if form.gate == "given":
        plgpu.copy_gmem_to_smem(at.token(ref.gate), s.high.at[group], s.ready)
        plgpu.copy_gmem_to_smem(at.token(ref.rest), s.g.at[group], s.ready)
    else:
        plgpu.copy_gmem_to_smem(at.token(ref.gate), s.g.at[group], s.ready)

        @pl.when(group == 0)
        def _():
            plgpu.copy_gmem_to_smem(ref.rate.at[at.head], s.rate, s.ready)
            plgpu.copy_gmem_to_smem(ref.bias.at[at.head], s.bias, s.ready)


def _meet(s) -> None:
    """Both warpgroups have written what the other reads next."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(s.met)
    plgpu.barrier_wait(s.met)


def _body(form: Form, ref, out, s) -> None:
    at = Place(*(lax.axis_index(name) for name in ("chunk", "head", "row", "group")))
    _fetch(form, ref, s, at)
    plgpu.barrier_wait(s.scores_ready)
    numbers = parts.Pairs(parts.iota(0), parts.iota(1))
    codes = parts.Codes(load(s.codes, parts.ROW), load(s.codes_again, parts.COLUMN))
    beta = load(s.beta, parts.ROW)
    d_beta = _through_inverse(out, s, at, beta)
    _pair_gradients(numbers, codes, s, at)

    plgpu.barrier_wait(s.ready)
    unit_q = unit_k = beta
    if form.normalize:
        unit_q, unit_k = (parts.unit_factor([x.at[0], x.at[1]]) for x in (s.q, s.k))
    tokens = Tokens(codes.bit(0), codes.bit(1), codes.bit(2), beta, unit_q, unit_k)
    last = ref.codes[at.row, at.chunk * CHUNK + CHUNK - 1]
    whole = (lax.shift_right_logical(last, 1) & 1).astype(jnp.float32)
    q, k = _tiles(form, s, at, tokens)
    high, low = _gate(form, s, at, tokens.valid)
    dq, dk, dg, more = _through_states(ref, s, at, tokens, (high, low), whole, q, k)
    _fetch_exponents(form, ref, s, at, jnp.int32(0))
    follow = partial(_fetch_exponents, form, ref, s, at)
    work = partial(_through_pairs, ref, s, at, tokens, (high, low), q, k, follow)
    dq, dk, dg, d_beta = parts.each_stage(form.backward_block(), work, (dq, dk, dg, d_beta + more))
    on_self = rows(load(s.on_self.at[0], parts.ROW))
    dq, dk = dq + on_self * k(), dk + on_self * q()
    _finish(form, ref, out, s, at, tokens, dq, dk, d_beta)
    _finish_gate(form, out, s, at, tokens, dg)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tiles(form: Form, s, at: Place, tokens: Tokens):
    """Functions that give this warpgroup's q (scaled, 0 at padding) and k."""
    of_q = tokens.valid * form.scale
    if not form.normalize:
        return (lambda: parts.wide_tile(s.q.at[at.group]) * rows(of_q), lambda: parts.wide_tile(s.k.at[at.group]))
    of_q = of_q * tokens.unit_q
    return (
        lambda: parts.wide_tile(s.q.at[at.group]) * rows(of_q),
        lambda: parts.wide_tile(s.k.at[at.group]) * rows(tokens.unit_k),
    )


def _through_inverse(out, s, at: Place, beta: jax.Array) -> jax.Array:
    """dR over the gradient of D, dV out; what dR says of beta."""
    d_right = dot((transposed(s.pairs.at[0]), s.left.at[1, at.group]))
    d_beta = jnp.sum(d_right * parts.wide_tile(s.v.at[at.group]), axis=1)
    plgpu.commit_smem()  # every warp has read it
    s.left.at[1, at.group][...] = d_right.astype(jnp.bfloat16)
    s.v.at[at.group][...] = (d_right * rows(beta)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.v.at[at.group], at.token(out.v))
    _meet(s)
    return d_beta


def _pair_gradients(numbers, codes, s, at: Place) -> None:
    """dP by the first warpgroup and dA by the second, pairs i > j, and dP's diagonal apart."""
    sign = jnp.where(at.group == 0, 1.0, -1.0).astype(jnp.float32)
    both = dot(*((s.left.at[at.group, half], transposed(s.written.at[half])) for half in range(2))) * sign
    s.on_self.at[at.group][...] = jnp.sum(jnp.where(numbers.i == numbers.j, both, 0.0), axis=1)
    pairs = codes.same() & (numbers.i > numbers.j)
    s.pairs.at[at.group][...] = jnp.where(pairs, both, 0.0).astype(jnp.bfloat16)
    _meet(s)


def _gate(form: Form, s, at: Place, valid: jax.Array):
    """Refs of the log-decay's two parts."""
    high = s.high.at[at.group]
    if form.gate == "given":
        return high, s.g.at[at.group]
    low = s.v.at[at.group]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dV has left
    rate, bias = (load(x.at[at.group], parts.COLUMN) for x in (s.rate, s.bias))
    g = parts.log_decay(form, parts.wide_tile(s.g.at[at.group]), rate, bias, valid)
    parts.put_split(g, high, low)
    plgpu.commit_smem()
    return high, low


def _through_states(ref, s, at: Place, tokens: Tokens, g, whole: jax.Array, q, k):
    """What reads of the state before the chunk and writes to the one after it say of q, k, g and beta.

    Args:
      g: refs of the log-decay's two parts.
      whole: 1 where one document holds the chunk from before its start to its end, else 0.
      q, k: functions that give tiles.
    """
    high, low = g
    before, after, until = s.states.at[at.group], s.d_states.at[at.group], s.until
    after_sums = parts.table(ref.tables, parts.AFTER)
    up_to = dot((until, high), (until, low))
    past = dot((after_sums, high), (after_sums, low))
    through = sum(parts.wide_tile(before.at[n]) * parts.wide_tile(after.at[n]) for n in range(2))
    through = through * jnp.exp2(up_to + past) * whole  # values by keys; of one sum over its rows
    head = jnp.exp2(up_to) * rows(tokens.head)
    dq = dot(*((s.left.at[0, n], before.at[n]) for n in range(2))) * head
    d_beta_k = dot(*((s.left.at[1, n], before.at[n]) for n in range(2))) * -head
    dk = d_beta_k * rows(tokens.beta)
    d_beta = jnp.sum(d_beta_k * k(), axis=1)
    d_tail = dot(*((s.written.at[n], after.at[n]) for n in range(2))) * jnp.exp2(past) * rows(tokens.tail)
    before_sums = parts.table(ref.tables, parts.BEFORE)
    plgpu.commit_smem()  # every warp has read the states
    parts.put_split(q() * dq + k() * dk + through, before.at[0], before.at[1])
    parts.put_split(k() * d_tail + through, after.at[0], after.at[1])
    _meet(s)  # and nobody reads ``left`` and ``written`` any more
    dg = dot(*((transposed(until), before.at[n]) for n in range(2)), *((before_sums, after.at[n]) for n in range(2)))
    return dq, dk + d_tail, dg, d_beta


def _fetch_exponents(form: Form, ref, s, at: Place, number) -> None:
    """Start the copy of a stage's exponents, where there is such a stage."""

    @pl.when((at.group == 0) & (number < parts.stages(form.backward_block())))
    def _():
        slot = lax.rem(number, jnp.int32(2))
        plgpu.copy_gmem_to_smem(ref.tables.at[parts.exponents(number)], s.written.at[slot], s.exponents_ready.at[slot])


def _through_pairs(ref, s, at: Place, tokens: Tokens, g, q, k, follow, stage: parts.Stage, sums):
    """``sums``, dq, dk, dg and d_beta, plus what a stage's pairs say."""
    dq, dk, dg, d_beta = sums
    earlier_k, later_q = s.states.at[at.group, 0], s.states.at[at.group, 1]
    later_k, spare = s.d_states.at[at.group, 0], s.d_states.at[at.group, 1]
    slot = lax.rem(stage.number, jnp.int32(2))  # the other warpgroup may still read the stage before
    d_pairs, exponents = s.left.at[slot], s.written.at[slot]
    of_stage = parts.table(ref.tables, parts.exponents(stage.number) + 1)
    plgpu.barrier_wait(s.exponents_ready.at[slot])
    later, earlier = parts.factors(exponents, stage, *g)
    plgpu.commit_smem()  # every warp is done with the buffers
    d_pairs.at[at.group][...] = load(s.pairs.at[at.group]) * of_stage
    earlier_k[...] = (k() * earlier).astype(jnp.bfloat16)
    later_q[...] = (q() * later).astype(jnp.bfloat16)
    later_k[...] = (k() * later * rows(tokens.beta)).astype(jnp.bfloat16)
    _meet(s)
    follow(stage.number + 1)

    d_earlier = dot((transposed(d_pairs.at[0]), later_q), (transposed(d_pairs.at[1]), later_k))
    dk = dk + d_earlier * earlier
    d_exponent = d_earlier * parts.wide_tile(earlier_k) * stage.sign

    d_later = dot((d_pairs.at[0], earlier_k))
    d_exponent = d_exponent + d_later * parts.wide_tile(later_q)
    dq = dq + d_later * later
    d_later = dot((d_pairs.at[1], earlier_k))
    d_exponent = d_exponent + d_later * parts.wide_tile(later_k)
    d_beta_k = d_later * later
    dk = dk + d_beta_k * rows(tokens.beta)
    d_beta = d_beta + jnp.sum(d_beta_k * k(), axis=1)
    plgpu.commit_smem()
    parts.put_split(d_exponent, spare, earlier_k)
    plgpu.commit_smem()
    dg = parts.dot_onto(
        dg,
        (lambda: transposed(s.written.at[slot]), lambda: s.d_states.at[at.group, 1]),
        (lambda: transposed(s.written.at[slot]), lambda: s.states.at[at.group, 0]),
    )
    return dq, dk, dg, d_beta


def _finish(
    form: Form, ref, out, s, at: Place, tokens: Tokens, dq: jax.Array, dk: jax.Array, d_beta: jax.Array
) -> None:
    """dq and dk through the scale and the norm, sums over channels with the other warpgroup, out."""
    dq = dq * rows(tokens.valid * form.scale)
    unit = {"q": tokens.unit_q, "k": tokens.unit_k}
    if form.normalize:
        for name, d, total in (("q", dq, s.q_sum), ("k", dk, s.k_sum)):
            raw = parts.wide_tile(getattr(s, name).at[at.group])
            total.at[at.group][...] = jnp.sum(raw * d, axis=1) * unit[name]
    s.beta_sum.at[at.group][...] = d_beta
    _meet(s)
    for name, d in (("q", dq), ("k", dk)):
        tile = getattr(s, name).at[at.group]
        if form.normalize:
            total = getattr(s, f"{name}_sum")
            along = load(total.at[0], parts.ROW) + load(total.at[1], parts.ROW)
            d = (d - parts.wide_tile(tile) * rows(unit[name] * along)) * rows(unit[name])
        tile[...] = d.astype(jnp.bfloat16)

    @pl.when(at.group == 0)
    def _():
        both = load(s.beta_sum.at[0], parts.ROW) + load(s.beta_sum.at[1], parts.ROW)
        s.on_self.at[1][...] = both
        plgpu.commit_smem()
        here = pl.ds(at.chunk * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(s.on_self.at[1], out.beta.at[at.row, at.head, here])

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(s.q.at[at.group], at.token(out.q))
    plgpu.copy_smem_to_gmem(s.k.at[at.group], at.token(out.k))


def _finish_gate(form: Form, out, s, at: Place, tokens: Tokens, dg: jax.Array) -> None:
    """dg through the gate, out."""
    if form.gate == "given":
        at.token(out.gate)[...] = dg * rows(tokens.valid)
        return
    tile = s.g.at[at.group]
    rate, bias = (load(x.at[at.group], parts.COLUMN) for x in (s.rate, s.bias))
    z = parts.wide_tile(tile) + columns(bias)
    dg = dg * rows(tokens.valid)
    if form.gate == "bounded":
        small = jnp.exp2(jnp.abs(z * columns(rate)) * -parts.LOG2E)  # the sigmoid's slope is small / (1 + small)^2
        chance = lax.rsqrt(1.0 + small)
        chance = chance * chance
        dz = dg * (small * chance * chance) * columns(rate) * form.lower_bound
    else:
        root = lax.rsqrt(1.0 + jnp.exp2(z * -parts.LOG2E))
        dz = dg * columns(rate) * -(root * root)
    tile[...] = dz.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile, at.token(out.gate))
