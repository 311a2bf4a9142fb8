"""What the Mosaic GPU kernels of the delta rule share: tiles, masks, products and the decay between tokens of a chunk.

A tile is [64 tokens, 64 channels] of float32 in the registers of one warpgroup, 32 a thread. All logarithms of decay
are to base 2.

Decay between the tokens of a chunk (:class:`Stage`). Pairs i >= j are shared out over stages: ``level`` b holds the
pairs whose tokens lie in neighbouring blocks of b inside a group of 2b, ``block`` b those inside one block of b. With a
reference token r a group, E_ij = 2^(G_i - G_r) 2^(G_r - G_j). In a level r is the last token of the earlier block, both
exponents are sums of a few log-decays of one sign and nothing can overflow; levels 1 to 32 and the diagonal hold every
pair for any decay. In a block r is its middle token, exponents are at most b/2 log-decays, which is in range for a
bounded gate only and saves the small levels. Both exponents are one product of a 0/1/-1 matrix with the log-decays, so
no sum is formed to be subtracted again, and gradients of log-decays are the transposed product.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

CHUNK = 64
WIDTH = 128
HALF = 64
TILE = (CHUNK, HALF)
LOG2E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
"""One value a row of a tile."""
COLUMN = WGMMA.reduce(0)
"""One value a column."""
SWIZZLED: Any = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]


class Form(NamedTuple):
    """What is fixed when a kernel is built."""

    gate: Literal["bounded", "softplus", "given"]
    """How the log-decay comes: k3-facts 2.1's two gates from raw values, or as it is (in two bfloat16 parts)."""
    lower_bound: float
    """Least log-decay a token of the bounded gate."""
    normalize: bool
    """Whether q and k get unit length first."""
    scale: float
    """Of q."""

    @property
    def narrow(self) -> bool:
        """Whether 32 tokens' decay stays inside float32 on both sides of the middle."""
        return self.gate == "bounded" and self.lower_bound >= -5

    def backward_block(self) -> int:
        """Tokens of the block stage of the scores' gradients, of any size, so factors stay below 2^58."""
        return 16 if self.narrow else 1


class Stage(NamedTuple):
    """Pairs of tokens that share a reference; see the module. Numbers are known when the kernel runs."""

    number: jax.Array
    """From 0; :func:`tables` has its exponents."""
    group: jax.Array
    """Tokens that share a reference."""
    bits: jax.Array
    """Of a token's number: a pair's later token has more in them."""
    sign: jax.Array
    """Of the exponent of the earlier token, float32: -1 in a block, 1 in a level."""


def each_stage[Sums](block: int, work: Callable[[Stage, Sums], Sums], sums: Sums) -> Sums:
    """``work`` over stages that hold all pairs i > j: a block of ``block`` tokens (none for 1), then the levels above.

    One loop in the kernel, not copies of its code: a kernel of more than some 8,000 instructions runs out of the
    instruction cache, and waited for its code more than half of the time.
    """
    blocks = int(block > 1)

    def one(n, sums):
        in_block = (n == 0) & (block > 1)
        group = lax.shift_left(jnp.int32(block if blocks else 2), n)
        bits = jnp.where(in_block, CHUNK - 1, lax.shift_right_logical(group, 1))
        return work(Stage(n, group, bits, jnp.where(in_block, -1.0, 1.0).astype(jnp.float32)), sums)

    return lax.fori_loop(0, stages(block), one, sums)


def stages(block: int) -> int:
    """How many there are in :func:`each_stage`."""
    return int(block > 1) + (CHUNK // block).bit_length() - 1


def level(n: jax.Array) -> Stage:
    """The level of blocks of 2^n, for :meth:`Masks.pairs` alone: it has no number."""
    bits = lax.shift_left(jnp.int32(1), n)
    return Stage(jnp.int32(-1), 2 * bits, bits, jnp.float32(1))


UNTIL, BEFORE, AFTER = 0, 1, 2
"""Places among :func:`tables` of sums of tokens: up to and including one's own, before it, after it."""


def exponents(number: jax.Array) -> jax.Array:
    """Place of a stage's exponents among :func:`tables`; its pairs come next."""
    return 2 * number + (AFTER + 1)


def tables(block: int) -> jax.Array:
    """Matrices [n, 64, 64] bfloat16 of 0, 1 and -1, left operands of the tensor cores.

    Sums of the tokens up to and including one's own, before it, and after it; then, for each stage of
    :func:`each_stage`, the exponents of the decay between a token and its reference (+ where the token is later, in a
    level + always), and 1 at its pairs i > j.

    They are loaded because that takes fewer instructions than forming them, and because they must not be formed from
    constants: ptxas of CUDA 12.8 to 13.2 can lose a constant fragment of an operand in registers, and the product then
    reads a register that nothing wrote. (``tests/mosaic_gpu_sass.py`` finds that.)
    """
    i, j = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]
    found: list[np.ndarray] = [i >= j, i > j, i < j]
    if block > 1:
        middle = (i & -block) + block // 2
        found.append(1 * ((j > middle) & (j <= i)) - 1 * ((j > i) & (j <= middle)))
        found.append(((i & -block) == (j & -block)) & (i > j))
    size = block
    while size < CHUNK:
        end = (i & -2 * size) + size - 1
        found.append(((j > end) & (j <= i)) | ((j > i) & (j <= end)))
        found.append(((i & -2 * size) == (j & -2 * size)) & ((i & size) > (j & size)))
        size *= 2
    return jnp.asarray(np.stack(found), jnp.bfloat16)


def references() -> jax.Array:
    """Matrices [3, 64, 64] like :func:`tables`, for all scores of a narrow gate in one go.

    Sums of the tokens up to and including one's own; exponents of the decay between a token and the middle token of its
    own 32, + where the token is later; and the same with the first 32 tokens' middle for every token. A pair i >= j
    meets at the middle r of j's 32 tokens: 2^(G_i - G_r) 2^(G_r - G_j). The second factor is at most 2^116, and where
    the first vanishes, their product is below 2^-10.
    """
    i, j = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None]
    middle = (i & -32) + 16
    of = lambda middle: 1 * ((j > middle) & (j <= i)) - 1 * ((j > i) & (j <= middle))  # noqa: E731
    return jnp.asarray(np.stack([1 * (i >= j), of(middle), of(0 * i + 16)]), jnp.bfloat16)


class Codes(NamedTuple):
    """Packing of a chunk's tokens, from int32 codes (``packing.py``): as rows and as columns of a tile."""

    row: jax.Array
    column: jax.Array

    def bit(self, number: int) -> jax.Array:
        """0.0 or 1.0 a row."""
        return bit(self.row, number)

    def same(self) -> jax.Array:
        """Pairs of one document, bool [64, 64]."""
        return rows(lax.shift_right_logical(self.row, 3)) == columns(lax.shift_right_logical(self.column, 3))


def bit(code: jax.Array, number: int) -> jax.Array:
    """A bit of int32 codes, 0.0 or 1.0."""
    return (lax.shift_right_logical(code, number) & 1).astype(jnp.float32)


def smem(*shape: int, dtype=jnp.bfloat16):
    """Shared memory that the tensor cores can read; the last axis is 64 channels of 2 bytes."""
    return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)


def compiler_params(sums_over_rows: bool = True) -> plgpu.CompilerParams:
    """Warpgroup semantics; exp2 and rsqrt are the hardware's, accurate to 2^-22.

    Args:
      sums_over_rows: whether the kernel forms any, which cross warps and need scratch memory.
    """
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        approx_math=True,
        reduction_scratch_bytes=2048 if sums_over_rows else 512,
    )


def transposed(ref):
    """The last two axes of a ref exchanged."""
    n = len(ref.shape)
    return ref.transpose((*range(n - 2), n - 1, n - 2))


def load(ref, layout: Any = WGMMA) -> jax.Array:
    """A ref's values in registers."""
    return plgpu.layout_cast(ref[...], layout)


def wide_tile(ref) -> jax.Array:
    """A bfloat16 tile in float32."""
    return load(ref).astype(jnp.float32)


def load_turned(ref) -> jax.Array:
    """A bfloat16 tile transposed."""
    return plgpu.layout_cast(load(transposed(ref), plgpu.Layout.WGMMA_TRANSPOSED), WGMMA)


def zeros(shape: tuple[int, int] = TILE) -> jax.Array:
    """A float32 tile of zeros."""
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), WGMMA)


def iota(dim: int) -> jax.Array:
    """Row or column numbers of a [64, 64] tile."""
    return plgpu.broadcasted_iota(jnp.int32, TILE, dim, layout=WGMMA)


def rows(x: jax.Array, shape: tuple[int, int] = TILE) -> jax.Array:
    """One value a row, to a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns(x: jax.Array, shape: tuple[int, int] = TILE) -> jax.Array:
    """One value a column, to a tile."""
    return lax.broadcast_in_dim(x, shape, [1])


def accumulators(count: int) -> list:
    """Tiles of zeros for ``run_scoped``, to which products add."""
    return [plgpu.WGMMAAccumulatorRef(TILE, jnp.float32) for _ in range(count)]


def dot(*pairs, shape: tuple[int, int] = TILE) -> jax.Array:
    """Sum of products a b on the tensor cores, a in registers or shared memory, b in shared memory."""

    def products(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def dot_onto(start: jax.Array, *pairs: tuple[jax.Array | Callable, Callable]) -> jax.Array:
    """``start`` plus products a b; refs are given as functions of nothing (closures are left alone)."""

    def products(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a() if callable(a) else a, b())

    run: Any = pl.run_state(products)
    return run(plgpu.WGMMAAccumulatorRef.init(start))


def put_split(value: jax.Array, high, low) -> None:
    """``value`` to two bfloat16 refs whose sum holds it to 16 bits."""
    bits = lax.bitcast_convert_type(value, jnp.int32) & -(1 << 16)  # cut off: rounding has to convert there and back
    top = lax.bitcast_convert_type(bits, jnp.float32)
    high[...] = top.astype(jnp.bfloat16)
    low[...] = (value - top).astype(jnp.bfloat16)


def table(ref, number) -> jax.Array:
    """One of :func:`tables` in registers, from global memory."""
    return plgpu.load(ref.at[number], layout=WGMMA, optimized=False)


class Pairs(NamedTuple):
    """Row and column numbers of a tile over pairs of tokens."""

    i: jax.Array
    j: jax.Array

    def of(self, stage: Stage) -> jax.Array:
        """Pairs i > j of a stage, bool."""
        i, j = self.i, self.j
        return ((i & -stage.group) == (j & -stage.group)) & ((i & stage.bits) > (j & stage.bits))


def factors(exponents, stage: Stage, high, low) -> tuple[jax.Array, jax.Array]:
    """Decay from the reference to a token, and from a token to the reference, as tiles.

    Args:
      exponents: the stage's, in registers or shared memory.
      stage: which pairs.
      high: ref [64, 64] with log-decays to base 2.
      low: what ``high`` leaves out.
    """
    exponent = dot((exponents, high), (exponents, low))
    return jnp.exp2(exponent), jnp.exp2(exponent * stage.sign)


def log_decay(form: Form, raw: jax.Array, rate: jax.Array, bias: jax.Array, valid: jax.Array) -> jax.Array:
    """Log-decay to base 2, a tile.

    Args:
      form: gate.
      raw: tile of raw gate inputs.
      rate: exp(A_log), one a column.
      bias: dt_bias, one a column.
      valid: 0.0 or 1.0 a row.
    """
    z = raw + columns(bias)
    if form.gate == "bounded":
        root = lax.rsqrt(1.0 + jnp.exp2(z * columns(rate * -LOG2E)))  # a third of a division's instructions
        return root * root * rows(valid * (form.lower_bound * LOG2E))
    small = jnp.exp2(jnp.abs(z) * -LOG2E)  # softplus z = max(z, 0) + log(1 + small)
    log = jnp.where(small < 0.03, small * (1.0 - small * (0.5 - small * (1 / 3))), jnp.log(1.0 + small))
    return (jnp.maximum(z, 0.0) + log) * columns(rate * -LOG2E) * rows(valid)


def unit_factor(halves: list, eps: float = 1e-6) -> jax.Array:
    """1 / sqrt(sum x^2 + eps) a row, from the two channel halves [64, 64] of x."""
    squares = [jnp.sum(x * x, axis=1) for x in map(wide_tile, halves)]
    return lax.rsqrt(squares[0] + squares[1] + eps)
