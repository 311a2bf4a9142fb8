"""Which source and row a sample is: pure functions of the mixture, the seed and the sample's number."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.data import mixture as module
from k3train.data.config import MixtureConfig
from k3train.data.mixture import Mixture
from k3train.data.shares import STAIRS, largest_remainder

ROW = 16


def mix(names: list[str], block: int, phases: list[tuple], row_tokens: int, seed: int, most=None) -> Mixture:
    """Phases are (tokens, weights) or (tokens, weights, blend)."""
    listed = [dict(zip(("tokens", "weights", "blend"), phase, strict=False)) for phase in phases]
    config = {"block": block, "phases": listed, "used_up": "reweight" if most else "error"}
    return module.mix(MixtureConfig.model_validate(config), names, row_tokens, seed, most)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Up to four sources in up to four phases, each source read in one of them at least."""
    names = [f"s{i}" for i in range(draw(st.integers(1, 4)))]
    block = draw(st.integers(len(names), 60))
    weights = st.integers(0, 3).map(float)
    phases, first = [], 0
    for phase in range(draw(st.integers(1, 4))):
        row = {name: draw(weights) for name in names}
        total, least = sum(row.values()), min((w for w in row.values() if w), default=0)
        if phase == 0 or not least or block * least < total:
            row = dict.fromkeys(names, 1.0)
        # Anywhere in the block before: the phase begins at the border that follows.
        phases.append((max(0, first * block * ROW - draw(st.integers(0, block * ROW - 1))), row))
        first += draw(st.integers(1, 5))
    return mix(names, block, phases, ROW, draw(st.integers(0, 2**63 - 1)))


def obvious(mixture: Mixture, samples: int) -> np.ndarray:
    """Rows of each source among the first samples, counted from their places one by one."""
    sources, _ = mixture.where(np.arange(samples))
    return np.bincount(sources, minlength=len(mixture.names))


@given(mixtures(), st.data())
def test_a_sample_depends_on_nothing_else(mixture, data):
    """Not on the start, on the batch or on which other samples are asked for."""
    whole = np.stack(mixture.where(np.arange(600)))
    start = data.draw(st.integers(0, 599))
    stop = data.draw(st.integers(start, 600))
    np.testing.assert_array_equal(np.stack(mixture.where(np.arange(start, stop))), whole[:, start:stop])
    some = np.array(data.draw(st.lists(st.integers(0, 599), min_size=1)))
    np.testing.assert_array_equal(np.stack(mixture.where(some)), whole[:, some])


@given(mixtures())
def test_every_block_has_the_counts_of_its_phase(mixture):
    for block in range(600 // mixture.block):
        sources, _ = mixture.where(np.arange(block * mixture.block, (block + 1) * mixture.block))
        phase = int(np.sum(mixture.firsts <= block)) - 1
        np.testing.assert_array_equal(np.bincount(sources, minlength=len(mixture.names)), mixture.counts[phase])


@given(mixtures())
def test_each_row_of_a_source_comes_once(mixture):
    samples = 600 // mixture.block * mixture.block
    sources, numbers = mixture.where(np.arange(samples))
    for source in range(len(mixture.names)):
        own = numbers[sources == source]
        assert sorted(own.tolist()) == list(range(len(own)))


@given(mixtures(), st.integers(0, 600))
def test_rows_read_so_far(mixture, samples):
    assert mixture.read(samples).tolist() == obvious(mixture, samples).tolist()


@given(mixtures(), st.integers(0, 3), st.integers(0, 300))
def test_the_sample_of_a_row_is_the_way_back(mixture, source, number):
    source %= len(mixture.names)
    sample = mixture.sample_of(source, number)
    if sample is None:
        assert mixture.counts[-1, source] == 0 and mixture.read(10**9)[source] <= number
    else:
        assert [int(found[0]) for found in mixture.where(np.array([sample]))] == [source, number]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any), st.integers(1, 5000))
def test_largest_remainder(weights, block):
    counts = largest_remainder([Fraction(w) for w in weights], block)
    assert sum(counts) == block
    quotas = [Fraction(block * w, sum(weights)) for w in weights]
    assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas, strict=True))
    # No row would come closer to its share elsewhere.
    up = [q - int(q) for c, q in zip(counts, quotas, strict=True) if c > q]
    down = [q - int(q) for c, q in zip(counts, quotas, strict=True) if c < q]
    assert not up or not down or min(up) >= max(down)


def test_the_order_is_fixed_for_good():
    mixture = mix(["b", "a"], 10, [(0, {"a": 0.7, "b": 0.3}), (160 * 2, {"a": 0.2, "b": 0.8})], ROW, 5)
    assert mixture.names == ("a", "b") and mixture.firsts.tolist() == [0, 2]
    assert mixture.counts.tolist() == [[7, 3], [2, 8]]
    sources, numbers = mixture.where(np.arange(15, 25))
    assert sources.tolist() == [0, 1, 0, 0, 0, 0, 1, 1, 1, 1]
    assert numbers.tolist() == [11, 4, 9, 13, 7, 14, 11, 6, 7, 8]


def test_long_runs_stay_inside():
    far = 2**62
    mixture = mix(["a", "b"], 1000, [(0, {"a": 0.999, "b": 0.001}), (10**18, {"a": 1, "b": 2})], 4096, 0)
    sources, numbers = mixture.where(np.arange(far, far + 2000))
    assert set(sources.tolist()) == {0, 1} and numbers.min() > 0
    for source in (0, 1):
        assert mixture.sample_of(source, int(numbers[sources == source][0])) in range(far, far + 2000)


def test_neighbouring_blocks_are_shuffled_otherwise():
    mixture = mix(["a", "b"], 50, [(0, {"a": 1, "b": 1})], ROW, 0)
    sources = mixture.where(np.arange(500))[0].reshape(10, 50)
    assert len({row.tobytes() for row in sources}) == 10
    other = mix(["a", "b"], 50, [(0, {"a": 1, "b": 1})], ROW, 1).where(np.arange(500))[0]
    assert (sources.ravel() != other).any()


def test_a_phase_that_is_added_changes_nothing_before_it():
    one = [(0, {"a": 0.5, "b": 0.5})]
    before = mix(["a", "b"], 10, one, ROW, 5)
    after = mix(["a", "b", "aa"], 10, [*one, (ROW * 30, {"a": 0.5, "b": 0.3, "aa": 0.2})], ROW, 5)
    named = [[m.names[source] for source in m.where(np.arange(30))[0].tolist()] for m in (before, after)]
    assert named[0] == named[1]
    np.testing.assert_array_equal(before.where(np.arange(30))[1], after.where(np.arange(30))[1])
    assert after.agrees(before, 30) and before.agrees(after, 30) and not after.agrees(before, 31)
    same_again = mix(["a", "b"], 10, [*one, (ROW * 30, {"a": 1, "b": 1})], ROW, 5)
    assert same_again.agrees(before, 10**6)
    assert not mix(["a", "b"], 20, one, ROW, 5).agrees(before, 30)


def test_a_blend_moves_block_by_block_to_the_next_phase():
    phases = [(0, {"a": 0.9, "b": 0.1}, "linear"), (ROW * 100, {"a": 0.1, "b": 0.9})]
    mixture = mix(["a", "b"], 10, phases, ROW, 5)
    assert [obvious_block(mixture, block) for block in range(12)] == [
        *([9, 1], [8, 2], [7, 3], [7, 3], [6, 4], [5, 5], [4, 6], [3, 7], [3, 7], [2, 8]),
        *([1, 9], [1, 9]),
    ]


def test_a_long_blend_takes_few_stairs_and_may_begin_or_end_at_nothing():
    phases = [(0, {"a": 1.0}), (ROW * 1000, {"a": 3}, "linear"), (ROW * 10**9, {"b": 0.5})]
    mixture = mix(["a", "b"], 1000, phases, ROW, 5)
    assert len(mixture.firsts) <= 1 + STAIRS + 1
    shares = mixture.counts[:, 1]
    assert shares[0] == 0 and shares[-1] == 1000 and (np.diff(shares) > 0).all()
    assert np.abs(np.diff(shares)).max() <= 1000 / STAIRS + 1


def obvious_block(mixture: Mixture, block: int) -> list[int]:
    sources, _ = mixture.where(np.arange(block * mixture.block, (block + 1) * mixture.block))
    return np.bincount(sources, minlength=len(mixture.names)).tolist()


@given(mixtures(), st.data())
def test_what_used_up_sources_leave_is_shared_among_the_others(mixture, data):
    """Block by block from the rows that are left; where all are used up, the next row is one too many."""
    names = list(mixture.names)
    most = {name: data.draw(st.none() | st.integers(1, 150)) for name in names}
    phases = [
        (int(first) * mixture.block * ROW, dict(zip(names, map(float, row), strict=True)))
        for first, row in zip(mixture.firsts, mixture.counts.tolist(), strict=True)
    ]
    limited = mix(names, mixture.block, phases, ROW, mixture.seed, most)
    left = [most[name] for name in names]
    for block in range(30):
        phase = int(np.searchsorted(mixture.firsts, block, side="right")) - 1
        live = [bool(count) and room != 0 for count, room in zip(mixture.counts[phase], left, strict=True)]
        found = obvious_block(limited, block)
        rooms = [room for room, alive in zip(left, live, strict=True) if alive]
        if not any(live) or (None not in rooms and sum(rooms) < mixture.block):
            assert found == mixture.counts[phase].tolist()
            return
        assert sum(found) == mixture.block
        for source, (count, room, alive) in enumerate(zip(found, left, live, strict=True)):
            assert (count == 0) or alive
            assert room is None or count <= room
            left[source] = None if room is None else room - count
        shares = mixture.counts[phase]
        if all(room is None or room + count >= share for room, count, share in zip(left, found, shares, strict=True)):
            assert found == shares.tolist()  # nobody was short


@pytest.mark.parametrize(
    ("phases", "says"),
    [
        ([], "the first phase begins at tokens: 0"),
        ([(5, {"a": 1, "b": 1})], "the first phase begins at tokens: 0"),
        ([(0, {"a": 1, "b": 1}), (0, {"a": 1})], "phase 1 .tokens: 0. does not begin at least one block of 10 rows"),
        ([(0, {"a": 1, "b": 1}), (161, {"a": 1}), (300, {"b": 1})], "phase 2 .tokens: 300. does not begin"),
        ([(0, {"a": 1, "c": 1})], r"phases\[0\].weights: no source c; data.sources has a, b"),
        ([(0, {"a": 1})], "sources b: no phase of the mixture gives a weight"),
        ([(0, {"a": 0.0, "b": 0})], r"phases\[0\].weights: no source has a weight above 0"),
        ([(0, {"a": 1, "b": 1}, "linear")], "the last one has no phase after it to blend to; set blend: none"),
        ([(0, {"a": 0.97, "b": 0.03})], r"weights.b: 0.03 gets no row in a block of 10; set mixture.block to 34 or"),
    ],
)
def test_refused(phases, says):
    with pytest.raises(ValueError, match=says):
        mix(["a", "b"], 10, phases, ROW, 0)


def test_the_block_that_is_named_would_do():
    assert mix(["a", "b"], 34, [(0, {"a": 0.97, "b": 0.03})], ROW, 0).counts.min() == 1
