"""Matrices of redundant experts: from their home to a slot, and the slots' gradients home again.

In a plan each rank is filled by one home, so a slot's matrix comes from one rank. With ``exact`` only the filled slots
travel (``ragged_all_to_all``), else all R C slots of an all-to-all do. Gradients travel and are added wide, in the
order of (rank, slot).

Letters: R ranks, G own experts, C slots, E = R G experts, X and Y the sizes of a matrix.
"""

import jax
import jax.numpy as jnp
from jax import lax

from k3train.parallel.moonep import ragged


def fetch(own: jax.Array, experts: jax.Array, axis: str, *, exact: bool) -> jax.Array:
    """Copies matrices into slots.

    Args:
      own: [G, X, Y], this rank's experts.
      experts: [R, C] int32, the experts wanted in every rank's slots, alike on all ranks; E in an empty slot.
      axis: mesh axis.
      exact: whether only filled slots travel.

    Returns:
      [C, X, Y]; zeros in an empty slot.
    """
    (ranks, slots), me = experts.shape, lax.axis_index(axis)
    home, which = experts // own.shape[0], experts % own.shape[0]  # [R, C]
    mine = home == me
    if exact:
        rows = own.shape[1]
        out = ragged.exchange(
            own.reshape(-1, own.shape[2]),
            slots * rows,
            starts=which * rows,
            sizes=jnp.where(mine, rows, 0),
            at=jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None] * rows, experts.shape),
            received=jnp.where(home[me][None] == jnp.arange(ranks, dtype=jnp.int32)[:, None], rows, 0),
            count=ragged.pieces(rows, slots),
            axis=axis,
        )
        return out.reshape(slots, *own.shape[1:])
    sent = jnp.where(mine[:, :, None, None], own[jnp.where(mine, which, 0)], jnp.zeros((), own.dtype))
    arrived = lax.all_to_all(sent, axis, 0, 0)  # [R, C, X, Y]
    filled = home[me] < ranks
    slot = arrived[jnp.minimum(home[me], ranks - 1), jnp.arange(slots, dtype=jnp.int32)]
    return jnp.where(filled[:, None, None], slot, jnp.zeros((), own.dtype))


def give_back(gradient: jax.Array, experts: jax.Array, own: int, axis: str, *, exact: bool) -> jax.Array:
    """Sends the slots' gradients to the experts' homes.

    Args:
      gradient: [C, X, Y] wide, of this rank's slots.
      experts: as in :func:`fetch`.
      own: G.
      axis, exact: as in :func:`fetch`.

    Returns:
      [R, C, X, Y], the gradients of slot c of rank r where its expert is at home here, else zeros.
    """
    (ranks, slots), me = experts.shape, lax.axis_index(axis)
    home = experts // own  # [R, C]
    to = home[me][None] == jnp.arange(ranks, dtype=jnp.int32)[:, None]  # [R, C] whether slot c goes to rank r
    if exact:
        rows = gradient.shape[1]
        slot = jnp.arange(slots, dtype=jnp.int32) * rows
        out = ragged.exchange(
            gradient.reshape(-1, gradient.shape[2]),
            ranks * slots * rows,
            starts=jnp.broadcast_to(slot[None], experts.shape),
            sizes=jnp.where(to, rows, 0),
            at=jnp.broadcast_to((me * slots * rows + slot)[None], experts.shape),
            received=jnp.where(home == me, rows, 0),
            count=ragged.pieces(rows, slots),
            axis=axis,
        )
        return out.reshape(ranks, *gradient.shape)
    sent = jnp.where(to[:, :, None, None], gradient[None], jnp.zeros((), gradient.dtype))
    return lax.all_to_all(sent, axis, 0, 0)


def add_returned(total: jax.Array, returned: jax.Array, experts: jax.Array, axis: str) -> jax.Array:
    """Adds what came home to the experts' own gradients, one slot after the other, by (rank, slot).

    Only the slots whose expert is at home here are touched, so the cost is that of what was redundant.

    Args:
      total: [G, X, Y] wide.
      returned: [R, C, X, Y] from :func:`give_back`.
      experts: as in :func:`fetch`.
      axis: mesh axis.
    """
    flat = experts.reshape(-1)
    mine = flat // total.shape[0] == lax.axis_index(axis)
    order = jnp.argsort(~mine, stable=True)  # slots that are ours first, in their order
    matrices = returned.reshape(-1, *returned.shape[2:])

    def add(i, total):
        at = order[i]
        which = flat[at] % total.shape[0]
        old = lax.dynamic_index_in_dim(total, which, keepdims=False)
        new = old + lax.dynamic_index_in_dim(matrices, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(total, new, which, 0)

    return lax.fori_loop(0, jnp.sum(mine, dtype=jnp.int32), add, total)


def fetch_all(own: jax.Array, experts: jax.Array, slots: int, turns: jax.Array, axis: str, *, exact: bool) -> jax.Array:
    """:func:`fetch` for more experts than there is room for on the way: ``slots`` at a time.

    Args:
      own, axis, exact: as in :func:`fetch`.
      experts: [R, F] int32, F a multiple of ``slots``, empty ones last.
      slots: C.
      turns: how often, alike on all ranks.

    Returns:
      [F, X, Y].
    """

    def one(turn, held):
        arrived = fetch(own, lax.dynamic_slice_in_dim(experts, turn * slots, slots, axis=1), axis, exact=exact)
        return lax.dynamic_update_slice_in_dim(held, arrived, turn * slots, axis=0)

    return lax.fori_loop(0, turns, one, jnp.zeros((experts.shape[1], *own.shape[1:]), own.dtype))


def give_back_all(
    gradient: jax.Array, experts: jax.Array, slots: int, turns: jax.Array, own: int, axis: str, *, exact: bool
) -> jax.Array:
    """Sends home and adds the gradients [F, X, Y] of what :func:`fetch_all` fetched: [G, X, Y], wide."""

    def one(turn, total):
        part = lax.dynamic_slice_in_dim(experts, turn * slots, slots, axis=1)
        mine = lax.dynamic_slice_in_dim(gradient, turn * slots, slots, axis=0)
        return add_returned(total, give_back(mine, part, own, axis, exact=exact), part, axis)

    return lax.fori_loop(0, turns, one, jnp.zeros((own, *gradient.shape[1:]), gradient.dtype))
