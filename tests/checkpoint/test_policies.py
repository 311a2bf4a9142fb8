"""What stays and what goes, by the policy alone."""

from hypothesis import given
from hypothesis import strategies as st

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.policies import Kept, surplus


def test_temporary_ones_go_when_there_is_a_newer():
    temporary = [Kept(step, "temporary") for step in (3, 7)]
    assert surplus([Kept(5), *temporary], CheckpointConfig()) == [3]
    assert surplus([Kept(5), *temporary, Kept(10)], CheckpointConfig()) == [3, 7]
    assert surplus(temporary[:1], CheckpointConfig()) == []


def test_the_best_stay():
    scored = [Kept(step, score=score) for step, score in ((1, 2.0), (2, 1.0), (3, float("nan")), (4, None), (5, 3.0))]
    assert surplus(scored, CheckpointConfig(keep=1, keep_best=1)) == [1, 3, 4]
    assert surplus(scored, CheckpointConfig(keep=1, keep_best=2)) == [3, 4]


def test_equal_scores_keep_the_newer():
    assert surplus([Kept(1, score=1.0), Kept(2, score=1.0), Kept(3)], CheckpointConfig(keep=1, keep_best=1)) == [1]


kinds = st.sampled_from(["permanent", "temporary", "final"])
any_kept = st.builds(Kept, st.integers(1, 50), kinds, st.one_of(st.none(), st.floats()), st.booleans())


@given(
    st.lists(any_kept, unique_by=lambda k: k.step),
    st.builds(CheckpointConfig, keep=st.integers(1, 4), keep_best=st.integers(0, 3)),
)
def test_the_newest_and_the_named_always_stay(checkpoints, config):
    gone = surplus(checkpoints, config)
    stay = [c for c in checkpoints if c.step not in gone]
    assert set(gone) <= {c.step for c in checkpoints}
    assert not checkpoints or max(c.step for c in checkpoints) not in gone
    assert not any(c.pinned and c.step in gone for c in checkpoints)
    steady = sorted(c.step for c in checkpoints if c.kind != "temporary")[-config.keep :]
    assert not set(steady) & set(gone)
    assert surplus(stay, config) == []  # what stays once, stays
