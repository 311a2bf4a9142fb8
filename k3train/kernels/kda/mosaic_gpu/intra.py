"""First kernel of the delta rule: all that a chunk of 64 tokens needs of itself, one warpgroup a chunk, head and row.

With the notation of ``chunked.py``: gate, unit length of q and k, decay inside the chunk, the scores P and A, the
inverse X = (I + A)^-1 and the factors W = X beta e^G k, U = X beta v. What the recurrence takes is written in bfloat16:
-W, U, e^G q, e^(G_C - G) k, P, and e^G_C in float32. The 128 key channels are worked through in two halves so that a
handful of tiles is alive at a time.

The inverse doubles exact inverses of diagonal blocks in float16: with beta <= 1 and keys of at most unit length all
entries stay at most 1, and float16 has three bits more than bfloat16 there.
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
from k3train.kernels.kda.mosaic_gpu.parts import CHUNK, HALF, Form, columns, dot, load, rows, transposed


class Raw(NamedTuple):
    """What the op is given, in the form the kernels load."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    """[B, T, H, 128] bfloat16, T a multiple of 64."""
    gate: jax.Array
    """Raw gate input, or the upper part of the log-decay to base 2, like q."""
    rest: jax.Array | None
    """The lower part of a given log-decay."""
    beta: jax.Array
    """[B, H, T] float32 in [0, 1], 0 at padding."""
    codes: jax.Array
    """[B, T] int32, see ``packing.py``."""
    rate: jax.Array
    """exp(A_log), [H, 128] float32."""
    bias: jax.Array
    """dt_bias, [H, 128] float32."""


class Factors(NamedTuple):
    """What the recurrence takes from a chunk; tokens' arrays are [B, T, H, 128] bfloat16."""

    minus_w: jax.Array
    u: jax.Array
    q: jax.Array
    """e^G q where the token's document began before the chunk, else 0."""
    k: jax.Array
    """e^(G_C - G) k where the token's document lasts to the chunk's end, else 0."""
    scores: jax.Array
    """P, [B, N, H, 64, 64] bfloat16."""
    decay: jax.Array
    """e^G_C where one document holds the chunk from before its start to its end, else 0; [B, N, H, 128] float32."""
    inverse: jax.Array | None
    """X, like P; only where asked for."""


def intra(form: Form, raw: Raw, *, inverse: bool) -> Factors:
    """Launch the kernel; ``inverse`` asks for X too (512 + 256 + 32 bytes a token and head are written, + 128)."""
    batch, tokens, heads, width = raw.q.shape
    chunks = tokens // CHUNK
    given = raw.rest is not None
    halved = raw._replace(rate=raw.rate.reshape(heads, 2, HALF), bias=raw.bias.reshape(heads, 2, HALF))

    def kda_intra(*refs, **scratch):
        names = Raw._fields if given else [n for n in Raw._fields if n != "rest"]
        inputs = SimpleNamespace(**dict(zip(names, refs, strict=False)))
        outs = SimpleNamespace(**dict(zip(Factors._fields, refs[len(names) + 1 :], strict=False)))
        _body(form, inputs, refs[len(names)], outs, SimpleNamespace(**scratch))

    token = jax.ShapeDtypeStruct((batch, tokens, heads, width), jnp.bfloat16)
    square = jax.ShapeDtypeStruct((batch, chunks, heads, CHUNK, CHUNK), jnp.bfloat16)
    decay = jax.ShapeDtypeStruct((batch, chunks, heads, 2, HALF), jnp.float32)
    half = lambda: parts.smem(2, CHUNK, HALF)  # noqa: E731
    out = plgpu.kernel(
        kda_intra,
        out_type=[token] * 4 + [square, decay] + [square] * inverse,
        grid=(chunks, heads, batch),
        grid_names=("chunk", "head", "row"),
        scratch_types={
            **{name: half() for name in ("q", "k", "g", "keys")},
            "low": half() if given else parts.smem(1, CHUNK, HALF),  # two blocks just fit into a multiprocessor
            **{name: parts.smem(CHUNK, CHUNK) for name in ("until", "columns")},
            "x": parts.smem(CHUNK, CHUNK, dtype=jnp.float16),
            "y": parts.smem(CHUNK, CHUNK, dtype=jnp.float16),
            "codes": plgpu.SMEM((CHUNK,), jnp.int32),
            "codes_again": plgpu.SMEM((CHUNK,), jnp.int32),  # one load serves one layout
            "beta": plgpu.SMEM((CHUNK,), jnp.float32),
            **{name: plgpu.SMEM((2, HALF), jnp.float32) for name in ("rate", "bias", "decay")},
            "ready": plgpu.Barrier(num_arrivals=12),
            "v_ready": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=parts.compiler_params(),
    )(*[x for x in halved if x is not None], parts.tables(form.forward_block()))
    found = Factors(*out, *[None] * (not inverse))
    return found._replace(decay=found.decay.reshape(batch, chunks, heads, width))


def _fetch(form: Form, ref, tables, s, token, at) -> None:
    """Start the copies of everything but v."""
    chunk, head, row = at
    here = pl.ds(chunk * CHUNK, CHUNK)
    for half in range(2):
        plgpu.copy_gmem_to_smem(token(ref.gate, half), s.g.at[half], s.ready)
        plgpu.copy_gmem_to_smem(token(ref.k, half), s.k.at[half], s.ready)
        plgpu.copy_gmem_to_smem(token(ref.q, half), s.q.at[half], s.ready)
        if form.gate == "given":
            plgpu.copy_gmem_to_smem(token(ref.rest, half), s.low.at[half], s.ready)
    if form.gate != "given":
        plgpu.copy_gmem_to_smem(ref.rate.at[head], s.rate, s.ready)
        plgpu.copy_gmem_to_smem(ref.bias.at[head], s.bias, s.ready)
    plgpu.copy_gmem_to_smem(tables.at[parts.UNTIL], s.until, s.ready)
    plgpu.copy_gmem_to_smem(ref.beta.at[row, head, here], s.beta, s.ready)
    plgpu.copy_gmem_to_smem(ref.codes.at[row, here], s.codes, s.ready)
    plgpu.copy_gmem_to_smem(ref.codes.at[row, here], s.codes_again, s.ready)


def _body(form: Form, ref, tables, out, s) -> None:
    at = chunk, head, row = tuple(lax.axis_index(name) for name in ("chunk", "head", "row"))

    def token(x, half):
        return x.at[row, pl.ds(chunk * CHUNK, CHUNK), head, pl.ds(half * HALF, HALF)]

    _fetch(form, ref, tables, s, token, at)
    plgpu.barrier_wait(s.ready)
    numbers = parts.Pairs(parts.iota(0), parts.iota(1))
    codes = parts.Codes(load(s.codes, parts.ROW), load(s.codes_again, parts.COLUMN))
    valid = codes.bit(0)
    of_k, of_q = None, valid * form.scale
    if form.normalize:
        of_k = parts.unit_factor([s.k.at[0], s.k.at[1]])
        of_q = of_q * parts.unit_factor([s.q.at[0], s.q.at[1]])
    last = ref.codes[row, chunk * CHUNK + CHUNK - 1]
    whole = (lax.shift_right_logical(last, 1) & 1).astype(jnp.float32)

    count = parts.stages(form.forward_block())

    def following(number):
        """The exponents of the next stage, asked for early."""
        return parts.table(tables, parts.exponents(lax.rem(number + 1, jnp.int32(count))))

    def one_half(half, sums):
        a, p, self_score, exponents = sums
        k = lambda: parts.wide_tile(s.k.at[half]) * (1.0 if of_k is None else rows(of_k))  # noqa: E731
        q = lambda: parts.wide_tile(s.q.at[half]) * rows(of_q)  # noqa: E731
        low = s.low.at[half] if form.gate == "given" else s.low.at[0]
        total = _gate(form, s, half, low, valid)
        s.decay.at[half][...] = jnp.exp2(total) * whole
        plgpu.commit_smem()
        self_score = self_score + jnp.sum(q() * k(), axis=1)
        work = partial(_scores, numbers, s, half, low, q, k, following)
        a, p, exponents = parts.each_stage(form.forward_block(), work, (a, p, exponents))
        _state_factors(tables, codes, s, half, low, q, k)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.k.at[half], token(out.k, half))
        plgpu.copy_smem_to_gmem(s.q.at[half], token(out.q, half))
        plgpu.copy_smem_to_gmem(s.decay.at[half], out.decay.at[row, chunk, head, half])
        return a, p, self_score, exponents

    start = parts.zeros(), parts.zeros(), valid * 0.0, following(jnp.int32(count - 1))
    a, p, self_score, _ = lax.fori_loop(0, 2, one_half, start)
    for half in range(2):
        plgpu.copy_gmem_to_smem(token(ref.v, half), s.g.at[half], s.v_ready)

    pairs = codes.same() & (numbers.i > numbers.j)
    p = jnp.where(pairs, p, jnp.where(numbers.i == numbers.j, rows(self_score), 0.0))
    s.columns[...] = p.astype(jnp.bfloat16)
    a = jnp.where(pairs, a, 0.0) * rows(load(s.beta, parts.ROW))
    x = _inverse(numbers, s, a)
    if hasattr(out, "inverse"):
        s.low.at[0][...] = x.astype(jnp.bfloat16)
    _write_factors(s, out, token, x)
    plgpu.copy_smem_to_gmem(s.columns, out.scores.at[row, chunk, head])
    if hasattr(out, "inverse"):
        plgpu.copy_smem_to_gmem(s.low.at[0], out.inverse.at[row, chunk, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _gate(form: Form, s, half, low, valid: jax.Array) -> jax.Array:
    """Log-decay in two parts to ``s.g`` and ``low``; its sum over the chunk, one value a channel."""
    high = s.g.at[half]
    if form.gate == "given":
        g = parts.wide_tile(high) + parts.wide_tile(low)
    else:
        rate, bias = (load(x.at[half], parts.COLUMN) for x in (s.rate, s.bias))
        g = parts.log_decay(form, parts.wide_tile(high), rate, bias) * rows(valid)
        parts.put_split(g, high, low)
    return jnp.sum(g, axis=0)


def _scores(numbers, s, half, low, q, k, following, stage: parts.Stage, sums):
    """A and P plus what this half of the channels says of a stage's pairs: k_i E_ij k_j and q_i E_ij k_j."""
    a, p, exponents = sums
    later, earlier = parts.factors(exponents, stage, s.g.at[half], low)
    exponents = following(stage.number)
    plgpu.commit_smem()  # every warp has read the stage before
    s.columns[...] = (k() * earlier).astype(jnp.bfloat16)
    plgpu.commit_smem()
    pairs, right = numbers.of(stage), transposed(s.columns)
    a = a + jnp.where(pairs, dot(((k() * later).astype(jnp.bfloat16), right)), 0.0)
    p = p + jnp.where(pairs, dot(((q() * later).astype(jnp.bfloat16), right)), 0.0)
    return a, p, exponents


def _state_factors(tables, codes, s, half, low, q, k) -> None:
    """e^G k to ``s.keys``, e^G q over q, e^(G_C - G) k over k."""
    high, until, after = s.g.at[half], s.until, parts.table(tables, parts.AFTER)
    head = jnp.exp2(dot((until, high), (until, low))) * rows(codes.bit(1))
    s.keys.at[half][...] = (k() * head).astype(jnp.bfloat16)
    s.q.at[half][...] = (q() * head).astype(jnp.bfloat16)
    tail = jnp.exp2(dot((after, high), (after, low))) * rows(codes.bit(2))
    s.k.at[half][...] = (k() * tail).astype(jnp.bfloat16)


def _inverse(numbers, s, a: jax.Array) -> jax.Array:
    """(I + a)^-1 of a strictly lower triangular tile, from blocks of 1 to the whole."""
    i, j = numbers.i, numbers.j

    def join(n, x):
        """Neighbouring blocks of 2^n."""
        narrow = x.astype(jnp.float16)
        plgpu.commit_smem()
        s.x[...] = narrow
        plgpu.commit_smem()
        seam = jnp.where(numbers.of(parts.level(n)), a, 0.0)
        s.y[...] = dot((seam.astype(jnp.float16), s.x)).astype(jnp.float16)
        plgpu.commit_smem()
        return parts.dot_onto(x, (-narrow, lambda: s.y))

    pairs = jnp.where(numbers.of(parts.level(jnp.int32(0))), a, 0.0)
    return lax.fori_loop(1, 6, join, jnp.where(i == j, 1.0, 0.0) - pairs)


def _write_factors(s, out, token, x: jax.Array) -> None:
    """-W and U."""
    left = (x * columns(load(s.beta, parts.COLUMN))).astype(jnp.bfloat16)
    plgpu.barrier_wait(s.v_ready)
    for half in range(2):
        w, u = dot((left, s.keys.at[half])), dot((left, s.g.at[half]))
        plgpu.commit_smem()  # every warp has read them
        s.keys.at[half][...] = (-w).astype(jnp.bfloat16)
        s.g.at[half][...] = u.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for half in range(2):
        plgpu.copy_smem_to_gmem(s.keys.at[half], token(out.minus_w, half))
        plgpu.copy_smem_to_gmem(s.g.at[half], token(out.u, half))
