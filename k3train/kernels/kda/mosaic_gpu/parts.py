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

    def forward_block(self) -> int:
        """Tokens of the scores' block stage: values there are products of unit keys, so it may be large."""
        return 32 if self.narrow else 1

    def backward_block(self) -> int:
        """The same for the scores' gradients, of any size, so factors stay below 2^58."""
        return 16 if self.narrow else 1


class Stage(NamedTuple):
    """Pairs of tokens that share a reference; see the module."""

    kind: Literal["block", "level"]
    size: int | jax.Array
    """A power of two; a number known when the kernel runs for levels."""


def each_stage[Sums](block: int, work: Callable[[Stage, Sums], Sums], sums: Sums) -> Sums:
    """``work`` over stages that hold all pairs i > j: a block of ``block`` tokens (none for 1), then the levels above.

    Levels are a loop in the kernel, not copies of its code: ptxas took minutes over the copies, and spilled more.
    """
    if block > 1:
        sums = work(Stage("block", block), sums)
    first = block.bit_length() - 1
    last = CHUNK.bit_length() - 1
    return lax.fori_loop(first, last, lambda n, sums: work(Stage("level", lax.shift_left(jnp.int32(1), n)), sums), sums)


class Codes(NamedTuple):
    """Packing of a chunk's tokens, from int32 codes (``packing.py``): as rows and as columns of a tile."""

    row: jax.Array
    column: jax.Array

    def bit(self, bit: int) -> jax.Array:
        """0.0 or 1.0 a row."""
        return (lax.shift_right_logical(self.row, bit) & 1).astype(jnp.float32)

    def same(self) -> jax.Array:
        """Pairs of one document, bool [64, 64]."""
        return rows(lax.shift_right_logical(self.row, 3)) == columns(lax.shift_right_logical(self.column, 3))


def smem(*shape: int, dtype=jnp.bfloat16):
    """Shared memory that the tensor cores can read; the last axis is 64 channels of 2 bytes."""
    return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)


def compiler_params() -> plgpu.CompilerParams:
    """Warpgroup semantics; exp2 and rsqrt are the hardware's, accurate to 2^-22."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True)


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


def token_sums(*tiles: jax.Array) -> jax.Array:
    """Sum over tokens of the sum of transposed tiles [channels, tokens], one value a channel (a row there).

    A sum over a tile's rows crosses warps and goes through scratch memory that all warpgroups of a block share, without
    a lock: only kernels with one warpgroup may ask for it. A sum over columns stays in a warp.
    """
    return sum(jnp.sum(tile.astype(jnp.float32), axis=1) for tile in tiles)  # pyright: ignore[reportReturnType]


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


def dot(*pairs, shape: tuple[int, int] = TILE) -> jax.Array:
    """Sum of products a b on the tensor cores, a in registers or shared memory, b in shared memory."""

    def products(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(products, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def dot_onto(start: jax.Array, *pairs: tuple[jax.Array, Callable]) -> jax.Array:
    """``start`` plus products a b; ``b`` is a function of nothing that gives a ref (a closure is left alone)."""

    def products(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b())

    run: Any = pl.run_state(products)
    return run(plgpu.WGMMAAccumulatorRef.init(start))


def put_split(value: jax.Array, high, low) -> None:
    """``value`` to two bfloat16 refs whose sum holds it to 16 bits."""
    top = value.astype(jnp.bfloat16)
    high[...] = top
    low[...] = (value - top.astype(jnp.float32)).astype(jnp.bfloat16)


class Masks:
    """0/1 matrices [64, 64] as left operands of the tensor cores.

    They are built from loaded values: ptxas of CUDA 12.8 to 13.2 can lose a constant fragment of an operand in
    registers, and the product then reads a register that nothing wrote. (``tests/gpu/hgmma.py`` finds that.)
    """

    def __init__(self, constants):
        """Args: constants: a ref that holds 1 and 0."""
        self.one, self.zero = constants[0], constants[1]
        self.i, self.j = iota(0), iota(1)

    def matrix(self, plus: jax.Array, minus: jax.Array | None = None) -> jax.Array:
        """1 where ``plus``, -1 where ``minus``, else 0."""
        rest = self.zero if minus is None else jnp.where(minus, -self.one, self.zero)
        return jnp.where(plus, self.one, rest).astype(jnp.bfloat16)

    def until(self, flip: bool = False) -> jax.Array:
        """Sums of tokens up to and including one's own; ``flip``: transposed."""
        return self.matrix(self.i <= self.j if flip else self.i >= self.j)

    def after(self, flip: bool = False) -> jax.Array:
        """Sums of the tokens after one's own; ``flip``: transposed."""
        return self.matrix(self.i > self.j if flip else self.i < self.j)

    def exponents(self, stage: Stage, flip: bool = False) -> jax.Array:
        """Log-decays between a token and its reference, + where the token is later, in a level + always."""
        i, j = (self.j, self.i) if flip else (self.i, self.j)
        b = stage.size
        if stage.kind == "block":
            middle = (i & -b) + b // 2
            return self.matrix((j > middle) & (j <= i), (j > i) & (j <= middle))
        end = (i & -2 * b) + b - 1
        return self.matrix(((j > end) & (j <= i)) | ((j > i) & (j <= end)))

    def pairs(self, stage: Stage, flip: bool = False) -> jax.Array:
        """Pairs i > j of a stage, bool; ``flip``: transposed."""
        i, j = (self.j, self.i) if flip else (self.i, self.j)
        b = stage.size
        if stage.kind == "block":
            return ((i & -b) == (j & -b)) & (i > j)
        return ((i & -2 * b) == (j & -2 * b)) & ((i & b) > (j & b))


def factors(masks: Masks, stage: Stage, high, low) -> tuple[jax.Array, jax.Array]:
    """Decay from the reference to a token, and from a token to the reference, as tiles; in a level both are one.

    Args:
      masks: as built in this kernel.
      stage: which pairs.
      high: ref [64, 64] with log-decays to base 2.
      low: what ``high`` leaves out.
    """
    sums = masks.exponents(stage)
    exponent = dot((sums, high), (sums, low))
    if stage.kind == "level":
        both = jnp.exp2(exponent)
        return both, both
    return jnp.exp2(exponent), jnp.exp2(-exponent)


def log_decay(form: Form, raw: jax.Array, rate: jax.Array, bias: jax.Array) -> jax.Array:
    """Log-decay to base 2, a tile.

    Args:
      form: gate.
      raw: tile of raw gate inputs.
      rate: exp(A_log), one a column.
      bias: dt_bias, one a column.
    """
    z = raw + columns(bias)
    if form.gate == "bounded":
        return (form.lower_bound * LOG2E) / (1.0 + jnp.exp2(z * columns(rate) * -LOG2E))
    small = jnp.exp2(jnp.abs(z) * -LOG2E)  # softplus z = max(z, 0) + log(1 + small)
    log = jnp.where(small < 0.03, small * (1.0 - small * (0.5 - small * (1 / 3))), jnp.log(1.0 + small))
    return (jnp.maximum(z, 0.0) + log) * columns(rate) * -LOG2E


def unit_factor(halves: list, eps: float = 1e-6) -> jax.Array:
    """1 / sqrt(sum x^2 + eps) a row, from the two channel halves [64, 64] of x."""
    squares = [jnp.sum(x * x, axis=1) for x in map(wide_tile, halves)]
    return lax.rsqrt(squares[0] + squares[1] + eps)
