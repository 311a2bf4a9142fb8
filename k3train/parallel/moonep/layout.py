"""Rows of one round: which experts a rank holds, and in which padded row each assignment is computed.

A rank has room for its own G experts and C redundant ones. A plan with more redundant experts somewhere is computed in
two rounds: the first takes all own experts and the first C redundant ones of every rank; the second needs no own
experts, so the rest fits into their room. As in kernels/grouped_matmul/permute.py, rows are sorted by expert and each
expert's rows are padded to whole blocks.

Letters: R ranks, E experts, G = E / R own experts, C slots, X experts held in a round, F foreign ones among them,
S tokens a rank, k assignments a token, P padded rows, b a block's rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.grouped_matmul.permute import block_rows
from k3train.parallel.moonep.plan import Plan


class Sizes(NamedTuple):
    """Static sizes of a layer on one rank."""

    axis: str
    ranks: int
    own: int
    slots: int
    tokens: int
    top_k: int
    block: int

    @property
    def experts(self) -> int:
        """E."""
        return self.ranks * self.own

    @property
    def rows(self) -> int:
        """P: S k rows, and padding of less than a block for every expert that can have any."""
        count = self.tokens * self.top_k
        return (count + min(self.own + self.slots, count) * (self.block - 1)) // self.block * self.block

    @property
    def late(self) -> int:
        """Foreign experts that a second round has room for, in whole slots; at most G - C are needed, as a rank is
        filled by one home. 0 where no plan can need a second round."""
        return 0 if self.ranks == 1 else -(-(self.own - self.slots) // self.slots) * self.slots


def sizes_of(axis: str, ids: jax.Array, own: int, slots: int, limit: int) -> Sizes:
    """Sizes for ``ids`` [S, k] with G = ``own`` experts here, at most ``slots`` redundant ones, blocks <= ``limit``.

    Raises:
      ValueError: several ranks and no slot.
    """
    ranks = lax.axis_size(axis)
    if ranks > 1 and slots < 1:
        raise ValueError(f"redundant_slots is {slots}: with {ranks} ranks at least one is needed")
    tokens, top_k = ids.shape
    # Balanced, the own experts share S k rows.
    block = block_rows(tokens, top_k, own, limit)
    return Sizes(axis, ranks, own, 0 if ranks == 1 else min(slots, own), tokens, top_k, block)


class Layout(NamedTuple):
    """One round on one rank."""

    target: jax.Array
    """[S, k] int32, 1 + (rank P + its padded row) of each assignment; 0 where it is not of this round."""
    rank: jax.Array
    """[S, k] int32, of the plan."""
    experts: jax.Array
    """[R, F] int32, the foreign experts that every rank holds; E where there is none."""
    group_sizes: jax.Array
    """[X] int32, true rows of each expert held here: own ones (first round only), then foreign ones."""
    block_expert: jax.Array
    """[P / b] int32, the expert of each block, never falling."""

    @property
    def active(self) -> jax.Array:
        """[S, k] bool, the assignments of this round."""
        return self.target > 0


def most_redundant(plan: Plan, sizes: Sizes) -> jax.Array:
    """Redundant experts of the rank that has most; int32, alike on all ranks."""
    return jnp.max(jnp.sum(plan.redundant < sizes.experts, axis=1, dtype=jnp.int32))


def rounds(plan: Plan, sizes: Sizes) -> jax.Array:
    """One round or two, int32, alike on all ranks."""
    return 1 + (most_redundant(plan, sizes) > sizes.slots).astype(jnp.int32)


def lay(plan: Plan, sizes: Sizes, turn: int) -> Layout:
    """Lays out round ``turn`` (0 or 1); every rank knows every rank's layout, so each names rows at the other end."""
    here = jnp.arange(sizes.ranks, dtype=jnp.int32)
    held = sizes.own + sizes.slots
    if turn == 0:
        experts, member = plan.redundant[:, : sizes.slots], plan.member
        active = member < held
    else:
        width = sizes.slots + sizes.late - sizes.own
        experts = jnp.pad(plan.redundant[:, sizes.slots :], ((0, 0), (0, width)), constant_values=sizes.experts)
        active, member = plan.member >= held, plan.member - held
    groups = plan.alloc.at[experts, here[:, None]].get(mode="fill", fill_value=0)  # [R, F]
    if turn == 0:
        stays = plan.alloc.reshape(sizes.ranks, sizes.own, sizes.ranks)[here, :, here]  # [R, G]
        groups = jnp.concatenate([stays, groups], axis=1)
    padded = (groups + sizes.block - 1) // sizes.block * sizes.block
    ends = jnp.cumsum(padded, axis=1, dtype=jnp.int32)
    start = (ends - padded)[plan.rank, jnp.where(active, member, 0)]
    target = jnp.where(active, 1 + plan.rank * sizes.rows + start + plan.place, 0)
    me = lax.axis_index(sizes.axis)
    first = jnp.arange(sizes.rows // sizes.block, dtype=jnp.int32) * sizes.block
    block_expert = jnp.searchsorted(ends[me], first, side="right").astype(jnp.int32)
    return Layout(target, plan.rank, experts, groups[me], jnp.minimum(block_expert, groups.shape[1] - 1))
