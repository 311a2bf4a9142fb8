"""A curriculum reads every row in parts of another length, and a step's rows depend on nothing but its number."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.data.batch import Batch, batch_hash
from k3train.data.course import Course, Stage
from k3train.data.loader import Loader
from k3train.data.reading import reading_of
from k3train.data.rows import plan_rows

S = 32
STAGES = (Stage(0, 8, 8, 1), Stage(200, 4, 16, 2), Stage(420, 4, S, 1))


def stages():
    """Up to four stages of a run whose whole rows have 32 tokens."""
    stage = st.tuples(st.integers(1, 400), st.integers(1, 6), st.sampled_from([1, 2, 4, 8, 16, 32]))

    def one_after_the_other(drawn):
        begin, found = 0, []
        for tokens, rows, length in drawn:
            found.append(Stage(begin, rows, length, 1))
            begin += tokens
        return tuple(found)

    return st.lists(stage, min_size=1, max_size=4).map(one_after_the_other)


@given(stages(), st.integers(0, 40))
def test_a_course_that_goes_on_is_the_course_from_the_beginning(stages, step):
    whole = Course(stages)
    later = Course(stages, step, whole.position(step), whole.tokens(step))
    for number in range(step, step + 30):
        assert later.rows_at(number) == whole.rows_at(number)
        assert later.leg(number).shape == whole.leg(number).shape
        assert later.tokens(number + 1) == whole.tokens(number + 1)
        assert later.position(number + 1) == whole.position(number + 1)


@given(stages())
def test_steps_follow_each_other_without_a_token_twice(stages):
    course, end, tokens = Course(stages), 0, 0
    for step in range(60):
        position, rows, length = course.rows_at(step)
        stage = [stage for stage in stages if stage.tokens <= tokens][-1]
        assert (rows, length) == (stage.rows, stage.length)
        assert end <= position < end + length and position % length == 0
        end, tokens = position + rows * length, tokens + rows * length
        assert (course.position(step + 1), course.tokens(step + 1)) == (end, tokens)
        assert course.steps_to(tokens) == course.steps_within(end) == step + 1
        assert course.steps_within(end - 1) == step


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_shorter_rows_are_parts_of_whole_ones_in_their_order(store, make_config, packing):
    config = make_config(packing=packing)
    plan = plan_rows(store, packing, S)
    reading = reading_of(plan, config, 11)
    whole, parts = reading.cut(np.arange(5)), reading.cut_at(8, 19, 8)
    for name in ("tokens", "targets", "loss_mask"):
        assert np.array_equal(getattr(parts, name), getattr(whole, name).reshape(20, 8)[1:]), name
    before = whole.segment_ids.reshape(20, 8)[1:]
    for found, row in zip(parts.segment_ids, before, strict=True):
        assert not np.any(found[row == 0])
        assert np.array_equal(np.diff(found[row > 0]), np.diff(row[row > 0])) and (found[0] == 1 or row[0] == 0)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_batches_at_the_changes_of_stages(store, make_config, packing):
    """The same on 1, 2 and 4 processes, and after a resume before, at and after each change."""
    config = make_config(packing=packing)

    def take(course: Course, count: int, part: int = 0, parts: int = 1) -> list[Batch]:
        loader = Loader(plan_rows(store, packing, S), config, course, 11, part, parts)
        found = [next(loader) for _ in range(count)]
        loader.close()
        return found

    course = Course(STAGES)
    changes = [leg.step for leg in course.legs]
    assert len(changes) == 3
    count = changes[-1] + 3
    whole = take(course, count)
    assert {batch.tokens.shape for batch in whole} == {(8, 8), (4, 16), (4, 32)}
    hashes = [batch_hash(batch) for batch in whole]
    for parts in (2, 4):
        shares = zip(*(take(course, count, part, parts) for part in range(parts)), strict=True)
        assert [batch_hash(Batch(*map(np.concatenate, zip(*own, strict=True)))) for own in shares] == hashes
    for step in {change + by for change in changes for by in (-1, 0, 1)} - {-1}:
        later = Course(STAGES, step, course.position(step), course.tokens(step))
        assert [batch_hash(batch) for batch in take(later, count - step)] == hashes[step:]


def test_what_a_part_of_a_row_holds(store, make_config):
    plan = plan_rows(store, "concat", S)
    loader = Loader(plan, make_config(), Course(STAGES), 11)
    batch, rows = next(loader), loader.trace.rows(*loader.course.rows_at(0))
    loader.close()
    assert [row.first_token for row in rows] == [0, 8, 16, 24] * 2
    for row, tokens, segments in zip(rows, batch.tokens, batch.segment_ids, strict=True):
        assert len(row.documents) == segments.max()
        for segment, number in enumerate(row.documents, start=1):
            assert tokens[segments == segment].tobytes() in store.train.document(number).tobytes()
