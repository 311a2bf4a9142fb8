"""The four kernels as calls on arrays: a grid over rows, heads and chunks, the chunks in order.

Tokens stay where the model has them: [B, T, H, K] is read as [B, T, H K] in tiles of [C, K], so nothing is transposed
but what is small. T need not divide into chunks: the last tile hangs over the end, its flags say so.

B rows, T tokens, H heads, N chunks, C tokens of a chunk, K/V key/value width.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from k3train.kernels.kda.mosaic_tpu import bodies
from k3train.kernels.kda.mosaic_tpu.pairs import CHUNK


class Arrays(NamedTuple):
    """What all kernels read."""

    scale: jax.Array
    """[1, 1] float32."""
    flags: jax.Array
    """[B, N, 1, C] float32 (``bodies.py``)."""
    beta: jax.Array
    """[B, H, N, 1, C] float32."""
    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    """[B, T, H, K], v [B, T, H, V], of any float dtype up to float32."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """B, H, N."""
        return self.q.shape[0], self.q.shape[2], self.flags.shape[1]


def forward(arrays: Arrays, first: jax.Array, precision: lax.PrecisionLike, *, save: bool) -> tuple[jax.Array, ...]:
    """Outputs and the last state; with ``save`` also the state that each chunk starts with, [B, H, N, V, K].

    Args:
      arrays: of the row.
      first: the row's first state [B, H, V, K] float32.
      precision: of products.
      save: for the backward pass.

    Returns:
      o [B, T, H, V] in v's dtype and the row's last state [B, H, V, K] float32, and the states.
    """
    at = _Specs(arrays, backwards=False)
    starts = [(jax.ShapeDtypeStruct((*arrays.grid, *first.shape[2:]), jnp.float32), at.chunk_state(first.shape))]
    outputs = [at.like(arrays.v), at.state(first.shape), *starts[: int(save)]]
    body = partial(bodies.forward, precision=precision, save=save)
    return at.call(body, "kda_forward", [(first, at.state(first.shape)[1])], outputs, first.shape[2:])


def forward_summary(arrays: Arrays, precision: lax.PrecisionLike) -> tuple[jax.Array, jax.Array]:
    """M [B, H, K, K] and B [B, H, K, V] of a shard, S_end = M S_start + B (k3-facts 2.7), float32.

    Args:
      arrays: of the shard.
      precision: of products.
    """
    at = _Specs(arrays, backwards=False)
    rows, heads, _ = arrays.grid
    key, value = arrays.k.shape[-1], arrays.v.shape[-1]
    both = (rows, heads, value + key, key)
    body = partial(bodies.forward_summary, precision=precision)
    (out,) = at.call(body, "kda_forward_summary", [], [at.state(both)], both[2:])
    out = jnp.swapaxes(out, -1, -2)
    return out[..., value:], out[..., :value]


def backward(
    arrays: Arrays, d_o: jax.Array, starts: jax.Array, d_last: jax.Array, precision: lax.PrecisionLike
) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, g (shapes and dtypes of theirs), beta [B, H, N, 1, C], and the first state [B, H, V, K].

    Args:
      arrays: as of :func:`forward`.
      d_o: of o [B, T, H, V].
      starts: the states that :func:`forward` saved.
      d_last: of the last state [B, H, V, K].
      precision: of products.
    """
    at = _Specs(arrays, backwards=True)
    extra = [(_flat(d_o), at.like(d_o)[1]), (starts, at.chunk_state(d_last.shape)), (d_last, at.state(d_last.shape)[1])]
    beta = (jax.ShapeDtypeStruct(arrays.beta.shape, jnp.float32), at.beta)
    outputs = [*(at.like(x) for x in (arrays.q, arrays.k, arrays.v, arrays.g)), beta, at.state(d_last.shape)]
    body = partial(bodies.backward, precision=precision)
    return at.call(body, "kda_backward", extra, outputs, d_last.shape[2:])


def backward_summary(arrays: Arrays, d_o: jax.Array, d_last: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    """The gradient of the first state [B, H, V, K] alone.

    Args:
      arrays: as of :func:`forward`.
      d_o: of o.
      d_last: of the last state.
      precision: of products.
    """
    at = _Specs(arrays, backwards=True)
    extra = [(_flat(d_o), at.like(d_o)[1]), (d_last, at.state(d_last.shape)[1])]
    body = partial(bodies.backward_summary, precision=precision)
    (out,) = at.call(body, "kda_backward_summary", extra, [at.state(d_last.shape)], d_last.shape[2:])
    return out


Output = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]


class _Specs:
    """Where the tiles of a grid step lie; ``backwards`` visits the chunks from the last to the first."""

    def __init__(self, arrays: Arrays, *, backwards: bool):
        self.arrays, chunks = arrays, arrays.grid[2]
        at = (lambda n: chunks - 1 - n) if backwards else (lambda n: n)
        self.at = at
        self.beta = pl.BlockSpec((None, None, None, 1, CHUNK), lambda b, h, n: (b, h, at(n), 0, 0))

    def tokens(self, width: int) -> pl.BlockSpec:
        """Of [B, T, H width]."""
        at = self.at
        return pl.BlockSpec((None, CHUNK, width), lambda b, h, n: (b, at(n), h))

    def like(self, x: jax.Array) -> Output:
        """An output of the shape and dtype of x [B, T, H, D], its heads side by side."""
        return jax.ShapeDtypeStruct(_flat(x).shape, x.dtype), self.tokens(x.shape[-1])

    def state(self, shape: tuple[int, ...]) -> Output:
        """An output [B, H, ...], one tile a head."""
        return jax.ShapeDtypeStruct(shape, jnp.float32), pl.BlockSpec(
            (None, None, *shape[2:]), lambda b, h, n: (b, h, 0, 0)
        )

    def chunk_state(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """Of [B, H, N, ...], one tile a chunk."""
        at = self.at
        return pl.BlockSpec((None, None, None, *shape[2:]), lambda b, h, n: (b, h, at(n), 0, 0))

    def call(self, body, name: str, extra: list, outputs: list[Output], carried: tuple[int, ...]):
        """Runs ``body`` over the grid on ``arrays`` and ``extra`` (arrays and where tiles lie), carrying a tile."""
        arrays = self.arrays
        at = self.at
        flags = pl.BlockSpec((None, None, 1, CHUNK), lambda b, h, n: (b, at(n), 0, 0))
        tokens = (arrays.q, arrays.k, arrays.v, arrays.g)
        results = pl.pallas_call(
            body,
            grid=arrays.grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.SMEM),
                flags,
                self.beta,
                *(self.tokens(x.shape[-1]) for x in tokens),
                *(spec for _, spec in extra),
            ],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            scratch_shapes=[pltpu.VMEM(carried, jnp.float32)],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            name=name,
        )(arrays.scale, arrays.flags, arrays.beta, *(_flat(x) for x in tokens), *(x for x, _ in extra))
        heads = arrays.grid[1]
        by_head = lambda x: x.reshape(*x.shape[:2], heads, -1) if x.ndim == 3 else x  # noqa: E731
        return tuple(by_head(x) for x in results)


def _flat(x: jax.Array) -> jax.Array:
    """[B, T, H, D] to [B, T, H D]."""
    return x.reshape(*x.shape[:2], -1)
