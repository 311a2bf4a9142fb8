"""Token rows to expert order and back: static shapes, nothing dropped at any skew.

Each token has k assignments. Assignments are sorted by expert and each expert's group is padded to whole
blocks, so that a block belongs to one expert. How many blocks can be needed at most is known beforehand;
blocks left over hold zero rows. Rows move by gathers only, in the gradients too.

Letters in shape comments: N tokens, k assignments of a token, A = N k, P padded rows, b a block's rows,
E experts, D width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from k3train.kernels.numerics import wide


class Plan(NamedTuple):
    """Where every assignment goes; integers only."""

    slot: jax.Array
    """[N, k] int32, the padded row of each assignment."""
    source: jax.Array
    """[P] int32, the assignment in each padded row (token * k + which), A for padding."""
    block_expert: jax.Array
    """[P / b] int32, the expert of each block, never falling."""


def block_rows(tokens: int, top_k: int, experts: int, limit: int) -> int:
    """Rows in a block: a power of two, about an eighth of the mean group, from 8 to ``limit``.

    Padding is at most a block an expert, so an eighth of the mean group wastes at most an eighth.
    """
    mean = tokens * top_k / experts
    rows = 8
    while rows * 2 <= min(limit, mean / 8):
        rows *= 2
    return min(rows, limit)


def plan(ids: jax.Array, experts: int, block: int) -> Plan:
    """Sorts assignments by expert, tokens of one expert in their order.

    The plan is named "routing", so that rematerialisation keeps it along with the ids.

    Args:
      ids: [N, k] int32 chosen experts, in [0, E).
      experts: E.
      block: b, rows in a block.
    """
    count = ids.size
    blocks = (count + min(experts, count) * (block - 1)) // block
    flat = ids.reshape(count)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # [A] assignments by expert
    index = jnp.arange(count, dtype=jnp.int32)
    rank = jnp.zeros(count, jnp.int32).at[order].set(index, unique_indices=True)  # [A] place in the order
    ends = jnp.searchsorted(flat[order], jnp.arange(experts, dtype=flat.dtype), side="right").astype(jnp.int32)  # [E]
    sizes = jnp.diff(ends, prepend=0)
    padded = (sizes + block - 1) // block * block
    padded_ends = jnp.cumsum(padded, dtype=jnp.int32)
    shift = (padded_ends - padded) - (ends - sizes)  # [E] from place in the order to padded row
    slot = rank + shift[flat]
    first = jnp.arange(blocks, dtype=jnp.int32) * block
    block_expert = jnp.searchsorted(padded_ends, first, side="right").astype(jnp.int32)
    block_expert = jnp.minimum(block_expert, experts - 1)
    row = first[:, None] + jnp.arange(block, dtype=jnp.int32)[None]  # [P / b, b]
    place = row - shift[block_expert][:, None]
    live = place < ends[block_expert][:, None]
    source = jnp.where(live, order[jnp.minimum(place, count - 1)], count)
    out = Plan(slot.reshape(ids.shape), source.reshape(-1), block_expert)
    return Plan(*(checkpoint_name(x, "routing") for x in out))


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """``x[rows]`` along the first axis, zeros where a row is beyond the end."""
    return x.at[rows].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x: jax.Array, plan: Plan) -> jax.Array:
    """Copies token rows ``x`` [N, D] into expert order: [P, D], zeros in padding."""
    return _take(x, plan.source // plan.slot.shape[1])


def _dispatch_forward(x, plan):
    return dispatch(x, plan), (plan, jnp.zeros((0,), x.dtype))


def _dispatch_backward(saved, d_rows):
    plan, like = saved
    return jnp.sum(wide(d_rows[plan.slot]), axis=1).astype(like.dtype), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(rows: jax.Array, weights: jax.Array, plan: Plan) -> jax.Array:
    """Weighted sum of each token's expert outputs.

    Args:
      rows: [P, D] outputs in expert order.
      weights: [N, k] wide.
      plan: the plan ``rows`` were dispatched by.

    Returns:
      [N, D] wide: products and sums are wide.
    """
    return jnp.sum(wide(rows[plan.slot]) * weights[:, :, None], axis=1)


def _combine_forward(rows, weights, plan):
    return combine(rows, weights, plan), (rows, weights, plan)


def _combine_backward(saved, dy):
    rows, weights, plan = saved
    d_weights = jnp.sum(wide(rows[plan.slot]) * dy[:, None], axis=2)  # [N, k]
    weight = _take(weights.reshape(-1), plan.source)  # [P]
    d_rows = _take(dy, plan.source // weights.shape[1]) * weight[:, None]
    return d_rows.astype(rows.dtype), d_weights, None


combine.defvjp(_combine_forward, _combine_backward)
