"""The planner of MoonEP: which rank computes which tokens of which expert, so that all ranks compute equally many.

Integers only, no randomness, computed alike on every rank from the number of tokens each rank has for each
expert: only these counts travel. Every rank gets exactly S k assignments; an expert whose home has too many is
computed elsewhere too (a *redundant* expert there). Algorithm: k3-facts 6.2.

Letters: R ranks, E experts, G = E / R experts at home on a rank, S tokens a rank, k assignments a token, A = S k.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


class Plan(NamedTuple):
    """Where every assignment of this rank goes; the first two arrays are alike on all ranks."""

    alloc: jax.Array
    """[E, R] int32, assignments of each expert that each rank computes."""
    redundant: jax.Array
    """[R, G] int32, the foreign experts of each rank, rising; E where there are no more."""
    rank: jax.Array
    """[S, k] int32, the rank that computes each assignment."""
    member: jax.Array
    """[S, k] int32, which of that rank's experts: its own are 0 to G - 1, then come the redundant ones in order."""
    place: jax.Array
    """[S, k] int32, the place among the assignments that this rank computes with this expert."""


def name(array: jax.Array) -> jax.Array:
    """Names an array "routing": rematerialisation keeps these and never chooses anew."""
    return checkpoint_name(array, "routing")


def level(load: jax.Array, ranks: int) -> jax.Array:
    """Shares out each expert's assignments so that all ranks have equally many.

    First whole amounts between ranks: the fullest rank fills up the emptiest, at most R - 1 times; so a rank is
    filled by one home only. Then, at each home, the largest amount still owed takes from the expert with most
    assignments left, until nothing is owed.

    Args:
      load: [E] int32, assignments of each expert; their sum is a multiple of R.
      ranks: R.

    Returns:
      [E, R] int32, assignments of expert e on rank r.
    """
    own = load.reshape(ranks, -1)  # [R, G]
    here = jnp.arange(ranks, dtype=jnp.int32)
    balance = jnp.sum(own, axis=1, dtype=jnp.int32) - jnp.sum(load, dtype=jnp.int32) // ranks

    def fill(_, state):
        owed, balance = state
        home, to = lax.argmax(balance, 0, jnp.int32), lax.argmin(balance, 0, jnp.int32)
        moved = jnp.where(balance[home] > 0, -balance[to], 0)
        owed = owed + jnp.where((here == home)[:, None] & (here == to)[None], moved, 0)
        return owed, balance + jnp.where(here == to, moved, 0) - jnp.where(here == home, moved, 0)

    owed = jnp.zeros((ranks, ranks), jnp.int32)
    owed, _ = lax.fori_loop(0, ranks - 1, fill, (owed, balance))  # [home, receiver]

    def take(state):
        owed, own, moved = state
        to, expert = lax.argmax(owed, 1, jnp.int32), lax.argmax(own, 1, jnp.int32)  # [R] each home's own choice
        to, expert = to[:, None] == here[None], expert[:, None] == jnp.arange(own.shape[1], dtype=jnp.int32)[None]
        amount = jnp.minimum(jnp.max(owed, axis=1), jnp.max(own, axis=1))
        owed = owed - jnp.where(to, amount[:, None], 0)
        own = own - jnp.where(expert, amount[:, None], 0)
        return owed, own, moved + jnp.where(expert[:, :, None] & to[:, None], amount[:, None, None], 0)

    moved = jnp.zeros((*own.shape, ranks), jnp.int32)  # [home, G, receiver]
    _, own, moved = lax.while_loop(lambda state: jnp.any(state[0] > 0), take, (owed, own, moved))
    stays = jnp.where((here[:, None] == here[None])[:, None], own[:, :, None], 0)
    return (moved + stays).reshape(load.shape[0], ranks)


def foreign(alloc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The redundant experts of a plan.

    Args:
      alloc: [E, R] from :func:`level`.

    Returns:
      ([E, R] int32, which of rank r's redundant experts e is, R G where it is none; the list :attr:`Plan.redundant`).
    """
    experts, ranks = alloc.shape
    home = jnp.arange(experts, dtype=jnp.int32)[:, None] // (experts // ranks)
    here = jnp.arange(ranks, dtype=jnp.int32)[None]
    away = (alloc > 0) & (home != here)
    ordinal = jnp.where(away, jnp.cumsum(away, axis=0, dtype=jnp.int32) - 1, experts)
    names = jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[:, None], alloc.shape)
    # One home fills a rank, so a rank has at most the G experts of that home.
    listed = jnp.sort(jnp.where(away, names, experts), axis=0)[: experts // ranks]
    return ordinal, listed.T


def _first_beyond(cumulative: jax.Array, row: jax.Array, value: jax.Array) -> jax.Array:
    """The first column r with ``cumulative[row, r] > value``, by halving; it exists."""
    ranks = cumulative.shape[1]
    flat = cumulative.reshape(-1)
    passed = jnp.zeros_like(value)
    step = 1 << (ranks - 1).bit_length()
    while step := step // 2:
        ahead = passed + step
        last = jnp.minimum(ahead, ranks - 1) - 1
        passed = jnp.where((ahead < ranks) & (flat[row * ranks + last] <= value), ahead, passed)
    return passed


def counted(ids: jax.Array, experts: int) -> tuple[jax.Array, jax.Array]:
    """Counts and numbers the assignments of each expert.

    Returns:
      ([E] int32 how many, [S, k] int32 each one's number among those of its expert, in token order).
    """
    count = ids.size
    flat = ids.reshape(count)
    order = jnp.argsort(flat, stable=True)
    place = jnp.zeros(count, jnp.int32).at[order].set(jnp.arange(count, dtype=jnp.int32), unique_indices=True)
    ends = jnp.searchsorted(flat[order], jnp.arange(experts, dtype=flat.dtype), side="right").astype(jnp.int32)
    load = jnp.diff(ends, prepend=0)
    return load, (place - (ends - load)[flat]).reshape(ids.shape)


def plan(ids: jax.Array, experts: int, axis: str) -> Plan:
    """Plans one layer's experts; called by every rank of ``axis`` inside a shard_map.

    An expert's assignments are numbered by (rank they come from, local order) and dealt out to ranks in that order.
    The arrays are named "routing", so that rematerialisation keeps them along with the ids.

    Args:
      ids: [S, k] int32, the experts chosen by this rank's tokens, in [0, E).
      experts: E, a multiple of the ranks.
      axis: name of the mesh axis whose ranks share the experts.
    """
    ranks, own = lax.axis_size(axis), experts // lax.axis_size(axis)
    load, number = counted(ids, experts)
    loads = lax.all_gather(load, axis)  # [R, E]
    alloc = level(jnp.sum(loads, axis=0, dtype=jnp.int32), ranks)
    ordinal, redundant = foreign(alloc)
    cumulative = jnp.cumsum(alloc, axis=1, dtype=jnp.int32)
    before = (jnp.cumsum(loads, axis=0, dtype=jnp.int32) - loads)[lax.axis_index(axis)]  # [E] on ranks before this
    number = number + before[ids]  # among all ranks' assignments of the expert
    rank = _first_beyond(cumulative, ids, number)
    place = number - (cumulative - alloc)[ids, rank]
    member = jnp.where(ids // own == rank, ids % own, own + ordinal[ids, rank])
    made = Plan(alloc, redundant, rank, member, place)
    return Plan(*(name(array) for array in made))


def rank_loads(alloc: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What levelling did: assignments a rank before and after, and redundant experts; each [R] int32."""
    experts, ranks = alloc.shape
    before = jnp.sum(alloc.reshape(ranks, -1), axis=1, dtype=jnp.int32)
    home = jnp.arange(experts, dtype=jnp.int32)[:, None] // (experts // ranks)
    away = (alloc > 0) & (home != jnp.arange(ranks, dtype=jnp.int32)[None])
    return before, jnp.sum(alloc, axis=0, dtype=jnp.int32), jnp.sum(away, axis=0, dtype=jnp.int32)
