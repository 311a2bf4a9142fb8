"""Rows of one round: which experts a rank holds, and in which padded row each assignment is computed.

A rank has room for its own G experts and C redundant ones. A plan with more redundant experts somewhere is computed
in rounds: round 0 takes all own experts and the first C redundant ones of every rank, round t only the next C. As in
kernels/grouped_matmul/permute.py, rows are sorted by expert and each expert's rows are padded to whole blocks.

Letters: R ranks, E experts, G = E / R own experts, C slots, S tokens a rank, k assignments a token, P padded rows,
b a block's rows.
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
    def one_round(self) -> bool:
        """Whether no plan can need a second round: a rank is filled by one home, which has G experts."""
        return self.ranks == 1 or self.slots >= self.own


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
    """[R, C] int32, the experts in every rank's slots; E where a slot is empty."""
    group_sizes: jax.Array
    """[G + C] int32, true rows of each expert here."""
    block_expert: jax.Array
    """[P / b] int32, the expert of each block, never falling."""

    @property
    def active(self) -> jax.Array:
        """[S, k] bool, the assignments of this round."""
        return self.target > 0


def rounds(plan: Plan, sizes: Sizes) -> jax.Array:
    """How many rounds the fullest rank needs, at least one; alike on all ranks."""
    if sizes.one_round:
        return jnp.ones((), jnp.int32)
    most = jnp.max(jnp.sum(plan.redundant < sizes.experts, axis=1, dtype=jnp.int32))
    return jnp.maximum(1, -(-most // sizes.slots))


def _group_sizes(plan: Plan, experts: jax.Array, sizes: Sizes, turn: jax.Array | int) -> jax.Array:
    """[R, G + C] int32, rows of each expert of each rank in round ``turn``."""
    here = jnp.arange(sizes.ranks, dtype=jnp.int32)
    stays = plan.alloc.reshape(sizes.ranks, sizes.own, sizes.ranks)[here, :, here]  # [R, G]
    stays = jnp.where(jnp.equal(turn, 0), stays, 0)
    comes = plan.alloc.at[experts, here[:, None]].get(mode="fill", fill_value=0)  # [R, C]
    return jnp.concatenate([stays, comes], axis=1)


def lay(plan: Plan, sizes: Sizes, turn: jax.Array | int) -> Layout:
    """Lays out round ``turn`` of a plan; every rank knows every rank's layout, so each names rows at the other end."""
    ranks, own, slots, block = sizes.ranks, sizes.own, sizes.slots, sizes.block
    if slots:
        listed = jnp.pad(plan.redundant, ((0, 0), (0, -own % slots)), constant_values=sizes.experts)
        experts = lax.dynamic_slice_in_dim(listed, turn * slots, slots, axis=1)
    else:
        experts = jnp.zeros((ranks, 0), jnp.int32)
    groups = _group_sizes(plan, experts, sizes, turn)
    padded = (groups + block - 1) // block * block
    ends = jnp.cumsum(padded, axis=1, dtype=jnp.int32)
    extra = jnp.maximum(plan.member - own, 0)
    divisor = max(slots, 1)
    member = jnp.where(plan.member < own, plan.member, own + extra % divisor)
    when = jnp.where(plan.member < own, 0, extra // divisor)
    row = (ends - padded)[plan.rank, member] + plan.place
    target = jnp.where(when == turn, 1 + plan.rank * sizes.rows + row, 0)
    me = lax.axis_index(sizes.axis)
    first = jnp.arange(sizes.rows // block, dtype=jnp.int32) * block
    block_expert = jnp.searchsorted(ends[me], first, side="right").astype(jnp.int32)
    return Layout(target, plan.rank, experts, groups[me], jnp.minimum(block_expert, own + slots - 1))
