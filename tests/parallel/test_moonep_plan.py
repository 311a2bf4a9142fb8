"""The planner: perfect balance at any load, one place for every assignment, the same on all ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3train.parallel.moonep.layout import Sizes, lay, rounds
from k3train.parallel.moonep.plan import level, plan, rank_loads

TOKENS, TOP_K = 12, 3
# (ranks, experts), kept few: each is compiled once.
SHAPES = ((1, 6), (2, 6), (4, 8), (4, 16))
EXAMPLES = settings(max_examples=60, deadline=None)


def reference_level(load: np.ndarray, ranks: int) -> np.ndarray:
    """k3-facts 6.2, steps 1 to 3, as loops over Python integers."""
    own = len(load) // ranks
    left = [[int(n) for n in load[h * own : (h + 1) * own]] for h in range(ranks)]
    balance = [sum(row) - int(load.sum()) // ranks for row in left]
    owed = np.zeros((ranks, ranks), int)
    moves = 0
    while max(balance) > 0:
        h, u = int(np.argmax(balance)), int(np.argmin(balance))
        owed[h, u] -= balance[u]
        balance[h] += balance[u]
        balance[u] = 0
        moves += 1
    assert moves <= ranks - 1
    alloc = np.zeros((len(load), ranks), int)
    for h in range(ranks):
        while owed[h].any():
            u, e = int(np.argmax(owed[h])), int(np.argmax(left[h]))
            amount = min(owed[h, u], left[h][e])
            alloc[h * own + e, u] += amount
            left[h][e] -= amount
            owed[h, u] -= amount
        for e in range(own):
            alloc[h * own + e, h] += left[h][e]
    return alloc


@functools.cache
def levelled(ranks):
    return jax.jit(functools.partial(level, ranks=ranks))


@st.composite
def loads(draw):
    """(load [E], ranks): what experts get, from adversarial families, its sum a multiple of the ranks."""
    ranks, experts = draw(st.sampled_from(((1, 6), (2, 8), (4, 16), (8, 64), (8, 8))))
    own = experts // ranks
    family = draw(st.sampled_from(("random", "one expert", "one rank", "powers", "empty", "equal")))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    match family:
        case "random":
            load = rng.integers(0, draw(st.sampled_from((2, 10, 5000))), experts)
        case "one expert":
            load = np.zeros(experts, int)
            load[rng.integers(experts)] = rng.integers(1, 1000)
        case "one rank":
            load = np.zeros(experts, int)
            first = rng.integers(ranks) * own
            load[first : first + own] = rng.integers(0, 100, own)
        case "powers":
            load = rng.permutation(2 ** (np.arange(experts) % 16))
        case "empty":
            load = rng.integers(0, 100, experts) * (rng.random(experts) < 0.2)
        case "equal":
            load = np.full(experts, rng.integers(0, 50))
    load[rng.integers(experts)] += -int(load.sum()) % ranks
    return load.astype(np.int32), ranks


@EXAMPLES
@given(loads())
def test_level_balances_exactly_with_few_redundant_experts(case):
    load, ranks = case
    alloc = np.asarray(levelled(ranks)(jnp.asarray(load)))
    np.testing.assert_array_equal(alloc, reference_level(load, ranks))
    assert alloc.min() >= 0
    np.testing.assert_array_equal(alloc.sum(1), load)
    np.testing.assert_array_equal(alloc.sum(0), load.sum() // ranks)
    home = np.arange(len(load)) // (len(load) // ranks)
    away = (alloc > 0) & (home[:, None] != np.arange(ranks))
    assert all(len(set(home[away[:, r]])) <= 1 for r in range(ranks)), "a rank is filled by two homes"
    # The bound of facts 6.1, in its tight form.
    assert away.sum(0).max() <= -(-len(load) * (ranks - 1) // ranks**2)
    assert sum(np.any(alloc[home == h][:, r] > 0) for h in range(ranks) for r in range(ranks) if r != h) <= ranks - 1
    before, after, redundant = rank_loads(jnp.asarray(alloc))
    np.testing.assert_array_equal(before, [load[home == r].sum() for r in range(ranks)])
    np.testing.assert_array_equal(after, alloc.sum(0))
    np.testing.assert_array_equal(redundant, away.sum(0))


@functools.cache
def planned(ranks, experts, slots):
    """Compiled: ids [R S, k] -> every rank's plan and its first rounds, two where there can be so many, by rank."""
    sizes = Sizes("expert", ranks, experts // ranks, 0 if ranks == 1 else slots, TOKENS, TOP_K, 4)

    def one(ids):
        made = plan(ids, experts, "expert")
        laid = [lay(made, sizes, turn) for turn in range(2 if sizes.late else 1)]
        return jax.tree.map(lambda a: a[None], (made, laid, rounds(made, sizes)))

    mesh = jax.make_mesh((ranks,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])
    mapped = jax.shard_map(one, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
    return jax.jit(mapped), sizes


@st.composite
def choices(draw):
    """(ids [R S, k], ranks, experts, slots), distinct experts a token."""
    ranks, experts = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    family = draw(st.sampled_from(("random", "skewed", "same", "one rank")))
    tokens = ranks * TOKENS
    match family:
        case "random":
            score = rng.random((tokens, experts))
        case "skewed":
            score = rng.gumbel(size=(tokens, experts)) + 6 * rng.random(experts) ** 4
        case "same":
            score = np.broadcast_to(rng.random(experts), (tokens, experts))
        case "one rank":
            score = rng.random((tokens, experts)) + (np.arange(experts) // (experts // ranks) == rng.integers(ranks))
    return np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32), ranks, experts, draw(st.sampled_from((1, 2)))


@EXAMPLES
@given(choices())
def test_every_assignment_has_one_place(case):
    ids, ranks, experts, slots = case
    run, sizes = planned(ranks, experts, slots)
    made, laid, turns = jax.tree.map(np.asarray, run(jnp.asarray(ids)))
    own = experts // ranks
    for array in (made.alloc, made.redundant, turns):
        assert all(np.array_equal(array[0], other) for other in array), "ranks disagree"
    alloc, redundant = made.alloc[0], made.redundant[0]
    rank = made.rank.reshape(ids.shape)
    np.testing.assert_array_equal(np.bincount(rank.ravel(), minlength=ranks), TOKENS * TOP_K)
    # An expert's assignments are dealt out in the order (rank, token) to ranks in their order.
    for e in range(experts):
        np.testing.assert_array_equal(rank.ravel()[ids.ravel() == e], np.repeat(np.arange(ranks), alloc[e]))
    member = made.member.reshape(ids.shape)
    table = np.concatenate([np.arange(experts).reshape(ranks, own), redundant], axis=1)
    np.testing.assert_array_equal(table[rank, member], ids)
    places = np.stack([rank, member, made.place.reshape(ids.shape)], axis=-1).reshape(-1, 3)
    assert len(np.unique(places, axis=0)) == len(places)
    check_rounds(ids, rank, laid, turns[0], sizes)


def check_rounds(ids, rank, laid, turns, sizes):
    """The first two rounds: rows in a block of the right expert, no row twice, nothing in two rounds."""
    assert 1 <= turns <= len(laid)
    seen = np.zeros(ids.shape, int)
    for turn, layout in enumerate(laid):
        target = layout.target.reshape(ids.shape)
        live = target > 0
        seen += live
        at, row = np.divmod(target[live] - 1, sizes.rows)
        np.testing.assert_array_equal(at, rank[live])
        assert len(np.unique(target[live])) == live.sum()
        member = layout.block_expert[at, row // sizes.block]
        held = layout.experts[0]
        if turn == 0:
            held = np.concatenate([np.arange(sizes.experts).reshape(sizes.ranks, -1), held], axis=1)
        np.testing.assert_array_equal(held[at, member], ids[live])
        counts = np.zeros(held.shape, int)
        np.add.at(counts, (at, member), 1)
        np.testing.assert_array_equal(layout.group_sizes, counts)
        assert np.all(np.diff(layout.block_expert, axis=1) >= 0)
        if turn >= turns:
            assert not live.any()
    np.testing.assert_array_equal(seen, 1)


def test_one_expert_takes_all():
    load = np.zeros(64, np.int32)
    load[37] = 8 * 1000
    alloc = np.asarray(levelled(8)(jnp.asarray(load)))
    np.testing.assert_array_equal(alloc[37], np.full(8, 1000))
    assert alloc.sum() == 8000
