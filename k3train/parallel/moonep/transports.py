"""Three ways in which token rows reach the ranks that compute them, and come home. Gathers and collectives only.

Each transport sends a token once to a rank, however many of its experts live there. All have the same face: ``out``
sends what belongs to tokens, ``back`` returns what the receivers made of each row they got, ``total`` adds up at home.
``phases`` is how often that must be done until everything has arrived: the same number on all ranks.

Letters: R ranks, S tokens a rank, k assignments a token, D columns of whatever travels, T rows that arrive in one
phase, H rows that come back.
"""

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.numerics import wide
from k3train.parallel.moonep import ragged
from k3train.parallel.moonep.config import Transport, default_capacity
from k3train.parallel.moonep.layout import Layout, Sizes

Count = jax.Array | int


def take(x: jax.Array, rows: jax.Array) -> jax.Array:
    """``x[rows]`` along the first axis, zeros where a row is beyond the end."""
    return x.at[rows].get(mode="fill", fill_value=0)


class Wire(Protocol):
    """The face of a transport for one round."""

    phases: Count
    """How often; the int 1 where it cannot be more."""

    def out(self, x: jax.Array, phase: Count) -> jax.Array:
        """What belongs to tokens, [S, D], to where they are computed: [T, D], zeros in rows that are not filled."""
        ...

    def back(self, x: jax.Array, phase: Count) -> jax.Array:
        """The way back of [T, D]: [H, D]."""
        ...

    def home(self, phase: Count) -> jax.Array:
        """[S, k] int32, the row of ``back`` that belongs to each assignment; H or more where none does."""
        ...

    def total(self, back: jax.Array, phase: Count) -> jax.Array:
        """[S, D] wide, each token's sum over the ranks that computed it, in a fixed order."""
        ...


class Copies(NamedTuple):
    """The copies of tokens that leave a rank, at most one a token and receiver, by (receiver, token)."""

    token: jax.Array
    """[S k] int32, the token of each copy; S beyond the last."""
    starts: jax.Array
    """[R + 1] int32, where each receiver's copies begin; the last is their number."""
    place: jax.Array
    """[S, k] int32, the number of an assignment's copy among its receiver's; undefined outside the round."""
    first: jax.Array
    """[S, k] bool, the one assignment for which each copy counts."""


def copies(rank: jax.Array, active: jax.Array, ranks: int) -> Copies:
    """Lists the copies for ``rank`` [S, k], the receivers of assignments that are ``active`` [S, k] bool."""
    tokens, top_k = rank.shape
    alike = (rank[:, :, None] == rank[:, None, :]) & active[:, None, :]  # [S, k, k]
    leader = lax.argmax(alike, 2, jnp.int32)  # [S, k] the first assignment of the token to the same receiver
    first = active & (leader == jnp.arange(top_k, dtype=jnp.int32)[None])
    number = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    key = jnp.where(first, rank * tokens + number, ranks * tokens).reshape(-1)
    order = jnp.argsort(key, stable=True)
    key = key[order]
    place = jnp.zeros(key.shape, jnp.int32)
    place = place.at[order].set(jnp.arange(key.size, dtype=jnp.int32), unique_indices=True).reshape(rank.shape)
    starts = jnp.searchsorted(key, jnp.arange(ranks + 1, dtype=jnp.int32) * tokens, side="left").astype(jnp.int32)
    token = jnp.where(key < ranks * tokens, key % tokens, tokens)
    return Copies(token, starts, jnp.take_along_axis(place, leader, axis=1) - starts[rank], first)


def sum_of_copies(back: jax.Array, home: jax.Array, first: jax.Array) -> jax.Array:
    """[S, D] wide: rows ``home`` [S, k] of ``back`` [H, D], each copy once; in the order of the assignments."""
    beyond = back.shape[0]
    total = jnp.zeros((home.shape[0], back.shape[1]), wide(back).dtype)
    for j in range(home.shape[1]):
        total = total + wide(take(back, jnp.where(first[:, j], home[:, j], beyond)))
    return total


class Gather:
    """All tokens to all ranks, partial sums back and added wide in the order of ranks. Static whatever the routing."""

    def __init__(self, layout: Layout, sizes: Sizes):
        self._sizes = sizes
        self.phases: Count = 1
        token = jnp.arange(sizes.tokens, dtype=jnp.int32)[:, None]
        self._home = jnp.where(layout.active, layout.rank * sizes.tokens + token, sizes.ranks * sizes.tokens)

    def out(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; T = R S."""
        return lax.all_gather(x, self._sizes.axis, tiled=True)

    def back(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; H = R S, by (rank, token). The sum that makes it a reduce-scatter is ``total``, wide."""
        return lax.all_to_all(x, self._sizes.axis, 0, 0, tiled=True)

    def home(self, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        return self._home

    def total(self, back: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        return jnp.sum(wide(back.reshape(self._sizes.ranks, self._sizes.tokens, -1)), axis=0)


class Padded:
    """All-to-all with room for ``capacity`` copies a pair, in as many phases as the fullest pair of all needs."""

    def __init__(self, layout: Layout, sizes: Sizes, capacity: int):
        self._sizes, self._active, self._rank = sizes, layout.active, layout.rank
        self._capacity = min(capacity, sizes.tokens)
        self._copies = copies(layout.rank, layout.active, sizes.ranks)
        self.phases: Count = 1
        if self._capacity < sizes.tokens:
            most = lax.pmax(jnp.max(jnp.diff(self._copies.starts)), sizes.axis)
            self.phases = jnp.maximum(1, -(-most // self._capacity))

    def out(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; T = R capacity, by (sender, place)."""
        token, starts = self._copies.token, self._copies.starts
        at = starts[:-1, None] + phase * self._capacity + jnp.arange(self._capacity, dtype=jnp.int32)[None]
        rows = jnp.where(at < starts[1:, None], take(token, at), self._sizes.tokens)
        return self.back(take(x, rows.reshape(-1)), phase)

    def back(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; H = R capacity, by (receiver, place)."""
        return lax.all_to_all(x, self._sizes.axis, 0, 0, tiled=True)

    def home(self, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        place = self._copies.place - phase * self._capacity
        here = self._active & (place >= 0) & (place < self._capacity)
        return jnp.where(here, self._rank * self._capacity + place, self._sizes.ranks * self._capacity)

    def total(self, back: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        return sum_of_copies(back, self.home(phase), self._copies.first)


class Ragged:
    """Exactly the copies that are needed, in one phase; on CPU an emulation (see :mod:`.ragged`)."""

    def __init__(self, layout: Layout, sizes: Sizes):
        ragged.note_platform()
        self._sizes = sizes
        self.phases: Count = 1
        self._active, self._rank = layout.active, layout.rank
        self._copies = copies(layout.rank, layout.active, sizes.ranks)
        # A rank computes S k assignments, and there are R S tokens: so many copies can arrive; as many can leave.
        self._rows = sizes.tokens * min(sizes.top_k, sizes.ranks)
        self._sent = jnp.diff(self._copies.starts)  # [R]
        everyone = lax.all_gather(self._sent, sizes.axis)  # [sender, receiver]
        me = lax.axis_index(sizes.axis)
        self._arrived = everyone[:, me]  # [R]
        # Copies lie by receiver where they leave, and by sender where they arrive.
        self._leave = jnp.cumsum(everyone, axis=1, dtype=jnp.int32) - everyone
        self._arrive = jnp.cumsum(everyone, axis=0, dtype=jnp.int32) - everyone
        self._me = me

    def _move(self, x, starts, sizes, at, received):
        starts, sizes, at, received = (a[:, None] for a in (starts, sizes, at, received))
        return ragged.exchange(
            x, self._rows, starts=starts, sizes=sizes, at=at, received=received,
            count=ragged.pieces(self._sizes.tokens), axis=self._sizes.axis,
        )  # fmt: skip

    def out(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; T = S min(k, R), the filled rows first, by sender."""
        rows = take(x, self._copies.token[: self._rows])
        return self._move(rows, self._leave[self._me], self._sent, self._arrive[self._me], self._arrived)

    def back(self, x: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`; H = S min(k, R), by receiver."""
        me = self._me
        return self._move(x, self._arrive[:, me], self._arrived, self._leave[:, me], self._sent)

    def home(self, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        return jnp.where(self._active, self._copies.starts[self._rank] + self._copies.place, self._rows)

    def total(self, back: jax.Array, phase: Count) -> jax.Array:
        """See :class:`Wire`."""
        return sum_of_copies(back, self.home(phase), self._copies.first)


def wire(transport: Transport, layout: Layout, sizes: Sizes, capacity: int | None) -> Wire:
    """The transport for one round; collective, as ``phases`` of ``padded`` is the same number on all ranks."""
    match transport:
        case "gather":
            return Gather(layout, sizes)
        case "padded":
            room = default_capacity(sizes.ranks, sizes.top_k, sizes.tokens) if capacity is None else capacity
            return Padded(layout, sizes, room)
        case "ragged":
            return Ragged(layout, sizes)


def copies_sent(rank: jax.Array, axis: str) -> jax.Array:
    """How many copies of this rank's tokens go to other ranks: int32, of :attr:`Plan.rank` [S, k]."""
    alike = rank[:, :, None] == rank[:, None, :]
    first = lax.argmax(alike, 2, jnp.int32) == jnp.arange(rank.shape[1], dtype=jnp.int32)[None]
    return jnp.sum(first & (rank != lax.axis_index(axis)), dtype=jnp.int32)
