"""First kernel of the delta rule: all that a chunk of 64 tokens needs of itself, one warpgroup a chunk, head and row.

With the notation of ``chunked.py``: gate, unit length of q and k, decay inside the chunk, the scores P and A, the
inverse X = (I + A)^-1 and the factors W = X beta e^G k, U = X beta v. What the recurrence takes is written in bfloat16:
-W, U, e^G q, e^(G_C - G) k, P, and e^G_C in float32. The 128 key channels are worked through in two halves so that a
handful of tiles is alive at a time.

The inverse doubles exact inverses of diagonal blocks in float16: with beta <= 1 and keys of at most unit length all
entries stay at most 1, and float16 has three bits more than bfloat16 there.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

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
    tables = parts.references() if form.narrow else parts.tables(1)
    out = plgpu.kernel(
        kda_intra,
        out_type=[token] * 4 + [square, decay] + [square] * inverse,
        grid=(chunks, heads, batch),
        grid_names=("chunk", "head", "row"),
        scratch_types=_scratch(form),
        compiler_params=parts.compiler_params(),
    )(*[x for x in halved if x is not None], tables)
    found = Factors(*out, *[None] * (not inverse))
    return found._replace(decay=found.decay.reshape(batch, chunks, heads, width))


def _scratch(form: Form) -> dict[str, Any]:
    """Shared memory of a block; two blocks just fit into a multiprocessor."""
    tile = parts.smem(CHUNK, CHUNK)
    low = parts.smem(2 if form.gate == "given" else 1, CHUNK, HALF)
    # What the two halves of the channels need, and then the inverse.
    halves = [low, tile] + [tile, tile] * form.narrow
    inverse = [parts.smem(2, CHUNK, CHUNK, dtype=jnp.float16), parts.smem(CHUNK, CHUNK, dtype=jnp.float16)]
    return {
        **{name: parts.smem(2, CHUNK, HALF) for name in ("q", "k", "g", "keys")},
        "columns": tile,
        "in_turn": plgpu.RefUnion(halves, inverse),
        "codes": plgpu.SMEM((CHUNK,), jnp.int32),
        "codes_again": plgpu.SMEM((CHUNK,), jnp.int32),  # one load serves one layout
        "beta": plgpu.SMEM((CHUNK,), jnp.float32),
        **{name: plgpu.SMEM((2, HALF), jnp.float32) for name in ("rate", "bias", "decay")},
        "gate_ready": plgpu.Barrier(num_arrivals=5),
        "ready": plgpu.Barrier(num_arrivals=9 if form.narrow else 7),
        "v_ready": plgpu.Barrier(num_arrivals=2),
    }


def _fetch(form: Form, ref, tables, s, token, at) -> None:
    """Start the copies of everything but v, those first that the gate takes."""
    chunk, head, row = at
    here = pl.ds(chunk * CHUNK, CHUNK)
    for half in range(2):
        plgpu.copy_gmem_to_smem(token(ref.gate, half), s.g.at[half], s.gate_ready)
        if form.gate == "given":
            plgpu.copy_gmem_to_smem(token(ref.rest, half), s.low.at[half], s.gate_ready)
    if form.gate != "given":
        plgpu.copy_gmem_to_smem(ref.rate.at[head], s.rate, s.gate_ready)
        plgpu.copy_gmem_to_smem(ref.bias.at[head], s.bias, s.gate_ready)
    plgpu.copy_gmem_to_smem(ref.codes.at[row, here], s.codes, s.gate_ready)
    for half in range(2):
        plgpu.copy_gmem_to_smem(token(ref.k, half), s.k.at[half], s.ready)
        plgpu.copy_gmem_to_smem(token(ref.q, half), s.q.at[half], s.ready)
    for place, matrix in enumerate(s.sums):
        plgpu.copy_gmem_to_smem(tables.at[place], matrix, s.ready)
    plgpu.copy_gmem_to_smem(ref.beta.at[row, head, here], s.beta, s.ready)
    plgpu.copy_gmem_to_smem(ref.codes.at[row, here], s.codes_again, s.ready)


def _body(form: Form, ref, tables, out, s) -> None:
    at = chunk, head, row = tuple(lax.axis_index(name) for name in ("chunk", "head", "row"))
    (s.low, *s.sums), (s.x, s.a) = s.in_turn

    def token(x, half):
        return x.at[row, pl.ds(chunk * CHUNK, CHUNK), head, pl.ds(half * HALF, HALF)]

    _fetch(form, ref, tables, s, token, at)
    last = ref.codes[row, chunk * CHUNK + CHUNK - 1]
    whole = (lax.shift_right_logical(last, 1) & 1).astype(jnp.float32)
    numbers = parts.Pairs(parts.iota(0), parts.iota(1))
    plgpu.barrier_wait(s.gate_ready)
    code = load(s.codes, parts.ROW)
    q = k = sums = cast(Any, None)  # q and k have not arrived before the gate of the first half is formed
    for half in range(2):
        low = s.low.at[half] if form.gate == "given" else s.low.at[0]
        total = _gate(form, s, half, low, parts.bit(code, 0))
        s.decay.at[half][...] = jnp.exp2(total) * whole
        plgpu.commit_smem()
        if half == 0:
            plgpu.barrier_wait(s.ready)
            q, k = _tiles(form, s, code)
        if form.narrow:
            sums = _in_one(code, s, half, low, q, k, total, sums)
        else:
            sums = _by_stages(numbers, tables, s, half, low, q, k, sums)
            _state_factors(tables, code, s, half, low, q, k)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(s.k.at[half], token(out.k, half))
        plgpu.copy_smem_to_gmem(s.q.at[half], token(out.q, half))
        plgpu.copy_smem_to_gmem(s.decay.at[half], out.decay.at[row, chunk, head, half])
        plgpu.copy_gmem_to_smem(token(ref.v, half), s.g.at[half], s.v_ready)

    codes = parts.Codes(code, load(s.codes_again, parts.COLUMN))
    if form.narrow:
        *sums, self_score = sums
        a, p = (jnp.concatenate(sums[n : n + 2], axis=1) for n in (0, 2))
    else:
        a, p, self_score, _ = sums
    pairs = codes.same() & (numbers.i > numbers.j)
    p = jnp.where(pairs, p, jnp.where(numbers.i == numbers.j, rows(self_score), 0.0))
    s.columns[...] = p.astype(jnp.bfloat16)
    a = jnp.where(pairs, a, 0.0) * rows(load(s.beta, parts.ROW))
    x = _inverse(numbers, s, a)  # commits the scores too
    plgpu.copy_smem_to_gmem(s.columns, out.scores.at[row, chunk, head])
    _write_factors(s, out, token, x)
    if hasattr(out, "inverse"):
        plgpu.copy_smem_to_gmem(s.low.at[0], out.inverse.at[row, chunk, head])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _tiles(form: Form, s, code: jax.Array):
    """Functions that give a half of q (scaled, 0 at padding) and of k."""
    of_k, of_q = None, parts.bit(code, 0) * form.scale
    if form.normalize:
        of_k = parts.unit_factor([s.k.at[0], s.k.at[1]])
        of_q = of_q * parts.unit_factor([s.q.at[0], s.q.at[1]])
    k = lambda half: parts.wide_tile(s.k.at[half]) * (1.0 if of_k is None else rows(of_k))  # noqa: E731
    return lambda half: parts.wide_tile(s.q.at[half]) * rows(of_q), k


def _gate(form: Form, s, half, low, valid: jax.Array) -> jax.Array:
    """Log-decay in two parts to ``s.g`` and ``low``; its sum over the chunk, one value a channel."""
    high = s.g.at[half]
    if form.gate == "given":
        g = parts.wide_tile(high) + parts.wide_tile(low)
    else:
        rate, bias = (load(x.at[half], parts.COLUMN) for x in (s.rate, s.bias))
        g = parts.log_decay(form, parts.wide_tile(high), rate, bias, valid)
        parts.put_split(g, high, low)
    return jnp.sum(g, axis=0)


def _in_one(code, s, half, low, q, k, total, sums):
    """A half's share in all scores of a narrow gate, and its factors of the state; see :func:`parts.references`.

    A row takes the reference of its column's 32 tokens, so A and P come in two halves of columns each. P's diagonal,
    all that a document's first token sees, is kept from rounding.
    """
    high = s.g.at[half]

    def exponents(*accs):
        for acc, matrix in zip(accs, s.sums, strict=True):
            for part in (high, low):
                plgpu.wgmma(acc, matrix, part)
        return tuple(acc[...] for acc in accs)

    since, to_own, to_first = pl.run_scoped(exponents, *parts.accumulators(3))
    keys = k(half)
    s.columns[...] = (keys * jnp.exp2(-to_own)).astype(jnp.bfloat16)
    head = jnp.exp2(since) * rows(parts.bit(code, 1))
    tail = jnp.exp2(columns(total) - since) * rows(parts.bit(code, 2))
    s.keys.at[half][...] = (keys * head).astype(jnp.bfloat16)
    s.k.at[half][...] = (keys * tail).astype(jnp.bfloat16)
    plgpu.commit_smem()
    from_first, from_own, queries = jnp.exp2(to_first), jnp.exp2(to_own), q(half)
    s.q.at[half][...] = (queries * head).astype(jnp.bfloat16)
    lefts = [(x * e).astype(jnp.bfloat16) for x in (keys, queries) for e in (from_first, from_own)]

    def products(accs):
        for n, (acc, left) in enumerate(zip(accs, lefts, strict=True)):
            plgpu.wgmma(acc, left, transposed(s.columns.at[pl.ds(n % 2 * (CHUNK // 2), CHUNK // 2)]))

    run: Any = pl.run_state(products)
    *sums, self_score = (*[parts.zeros((CHUNK, CHUNK // 2))] * 4, 0.0) if sums is None else sums
    self_score = self_score + jnp.sum(queries * keys, axis=1)
    return *run(tuple(plgpu.WGMMAAccumulatorRef.init(x) for x in sums)), self_score


def _by_stages(numbers, tables, s, half, low, q, k, sums):
    """A half's share in A, P and P's diagonal, stage by stage; and the first stage's exponents, for the next half."""
    exponents = lambda number: parts.table(tables, parts.exponents(number))  # noqa: E731

    def work(stage: parts.Stage, sums):
        """k_i E_ij k_j and q_i E_ij k_j of a stage's pairs."""
        a, p, given = sums
        later, earlier = parts.factors(given, stage, s.g.at[half], low)
        given = exponents(lax.rem(stage.number + 1, jnp.int32(parts.stages(1))))  # the next stage's, asked for early
        plgpu.commit_smem()  # every warp has read the stage before
        s.columns[...] = (k(half) * earlier).astype(jnp.bfloat16)
        plgpu.commit_smem()
        pairs, right = numbers.of(stage), transposed(s.columns)
        a = a + jnp.where(pairs, dot(((k(half) * later).astype(jnp.bfloat16), right)), 0.0)
        p = p + jnp.where(pairs, dot(((q(half) * later).astype(jnp.bfloat16), right)), 0.0)
        return a, p, given

    a, p, self_score, given = sums or (parts.zeros(), parts.zeros(), 0.0, exponents(jnp.int32(0)))
    self_score = self_score + jnp.sum(q(half) * k(half), axis=1)
    a, p, given = parts.each_stage(1, work, (a, p, given))
    return a, p, self_score, given


def _state_factors(tables, code, s, half, low, q, k) -> None:
    """e^G k to ``s.keys``, e^G q over q, e^(G_C - G) k over k."""
    high, until, after = s.g.at[half], s.sums[0], parts.table(tables, parts.AFTER)
    head = jnp.exp2(dot((until, high), (until, low))) * rows(parts.bit(code, 1))
    s.keys.at[half][...] = (k(half) * head).astype(jnp.bfloat16)
    s.q.at[half][...] = (q(half) * head).astype(jnp.bfloat16)
    tail = jnp.exp2(dot((after, high), (after, low))) * rows(parts.bit(code, 2))
    s.k.at[half][...] = (k(half) * tail).astype(jnp.bfloat16)


def _inverse(numbers, s, a: jax.Array) -> jax.Array:
    """(I + a)^-1 of a strictly lower triangular tile, from blocks of 1 to the whole.

    With x the inverse of diagonal blocks of n, the block of x a x at two neighbours' seam is what the inverse of 2n
    lacks; all other blocks of x a x are left aside.
    """
    s.a[...] = a.astype(jnp.float16)

    def join(n, x):
        """Neighbouring blocks of 2^n."""
        narrow, kept = x.astype(jnp.float16), s.x.at[n & 1]
        kept[...] = narrow
        plgpu.commit_smem()
        left = dot((narrow, s.a)).astype(jnp.float16)
        return x - jnp.where(numbers.of(parts.level(n)), dot((left, kept)), 0.0)

    pairs = jnp.where(numbers.of(parts.level(jnp.int32(0))), a, 0.0)
    return lax.fori_loop(1, 6, join, jnp.where(numbers.i == numbers.j, 1.0, 0.0) - pairs)


def _write_factors(s, out, token, x: jax.Array) -> None:
    """-W, U and, where asked for, X, to shared memory; W and U on to their places."""
    left = (x * columns(load(s.beta, parts.COLUMN))).astype(jnp.bfloat16)
    plgpu.barrier_wait(s.v_ready)

    def products(*accs):
        for acc, right in zip(accs, (s.keys.at[0], s.keys.at[1], s.g.at[0], s.g.at[1]), strict=True):
            plgpu.wgmma(acc, left, right)
        return tuple(acc[...] for acc in accs)

    *w, u0, u1 = pl.run_scoped(products, *parts.accumulators(4))
    plgpu.commit_smem()  # every warp has read them
    if hasattr(out, "inverse"):
        s.low.at[0][...] = x.astype(jnp.bfloat16)
    for half, (minus_w, u) in enumerate(((-w[0], u0), (-w[1], u1))):
        s.keys.at[half][...] = minus_w.astype(jnp.bfloat16)
        s.g.at[half][...] = u.astype(jnp.bfloat16)
    plgpu.commit_smem()
    for half in range(2):
        plgpu.copy_smem_to_gmem(s.keys.at[half], token(out.minus_w, half))
        plgpu.copy_smem_to_gmem(s.g.at[half], token(out.u, half))
