"""Grouped matmul as batched matmuls of blocks, each with a copy of its expert's matrix.

Gathered matrices of all blocks may be many times the weights, so blocks go through a scan in chunks whose
gathered matrices stay below CHUNK_BYTES; a small problem is one chunk and has no scan. In the gradient of
the weights the products of one chunk's blocks are added to their experts before the next chunk.

Letters in shape comments: G blocks of a chunk, n chunks, b a block's rows, E experts, L and M widths.
"""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide_dtype

CHUNK_BYTES = 128 * 2**20


def _chunk(blocks: int, weights: jax.Array) -> int:
    """Blocks a chunk; the last chunk is filled up with blocks of zero rows."""
    most = max(1, CHUNK_BYTES // (weights.shape[1] * weights.shape[2] * weights.dtype.itemsize))
    chunks = -(-blocks // most)
    return -(-blocks // chunks)


def _cut(x: jax.Array, blocks: int, chunk: int) -> jax.Array:
    """[blocks * b, ...] -> [n, G, b, ...], zero rows appended to fill the last chunk."""
    x = x.reshape(blocks, -1, *x.shape[1:])
    x = jnp.pad(x, ((0, -blocks % chunk),) + ((0, 0),) * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])


def _experts(block_expert: jax.Array, chunk: int) -> jax.Array:
    """[blocks] -> [n, G]; blocks that fill the last chunk repeat the last expert, to stay sorted."""
    return jnp.pad(block_expert, (0, -block_expert.shape[0] % chunk), mode="edge").reshape(-1, chunk)


def _each_block(rows: jax.Array, weights: jax.Array, block_expert: jax.Array, equation: str) -> jax.Array:
    """Every block of ``rows`` with its expert's matrix, by ``equation``; in the dtype of ``rows``."""
    blocks = block_expert.shape[0]
    chunk = _chunk(blocks, weights)

    def step(_, xs):
        x, expert = xs
        y = jnp.einsum(equation, x, weights[expert], preferred_element_type=wide_dtype(x.dtype))
        return None, y.astype(x.dtype)

    xs = _cut(rows, blocks, chunk), _experts(block_expert, chunk)
    if blocks == chunk:
        out = step(None, jax.tree.map(lambda x: x[0], xs))[1]
    else:
        out = jax.lax.scan(step, None, xs)[1]  # [n, G, b, M]
    return out.reshape(-1, out.shape[-1])[: rows.shape[0]]


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, weights: jax.Array, block_expert: jax.Array) -> jax.Array:
    """See :func:`k3train.kernels.grouped_matmul.api.grouped_matmul`."""
    return _each_block(rows, weights, block_expert, "gbl,glm->gbm")


def _forward(rows, weights, block_expert):
    return grouped_matmul(rows, weights, block_expert), (rows, weights, block_expert)


def _backward(saved, dy):
    rows, weights, block_expert = saved
    d_rows, d_weights = gradients(rows, weights, block_expert, dy)
    return d_rows, d_weights.astype(weights.dtype), None


def gradients(
    rows: jax.Array, weights: jax.Array, block_expert: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See :func:`k3train.kernels.grouped_matmul.api.gradients`."""
    blocks = block_expert.shape[0]
    chunk = _chunk(blocks, weights)
    d_rows = _each_block(dy, weights, block_expert, "gbm,glm->gbl")

    def step(total, xs):
        x, g, expert = xs
        products = jnp.einsum("gbl,gbm->glm", x, g, preferred_element_type=total.dtype)
        return total.at[expert].add(products, indices_are_sorted=True), None

    xs = _cut(rows, blocks, chunk), _cut(dy, blocks, chunk), _experts(block_expert, chunk)
    total = jnp.zeros(weights.shape, wide_dtype(weights.dtype))
    if blocks == chunk:
        total = step(total, jax.tree.map(lambda x: x[0], xs))[0]
    else:
        total = jax.lax.scan(step, total, xs)[0]
    return d_rows, total


grouped_matmul.defvjp(_forward, _backward)
