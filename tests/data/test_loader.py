import os
import shutil

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data import token_reader
from k3train.data.batch import Batch, batch_hash
from k3train.data.course import Course
from k3train.data.holdout import holdout_batches
from k3train.data.loader import Loader
from k3train.data.order import RowOrder
from k3train.data.pack import Chunks, RowPlan
from k3train.data.prepare import prepare
from k3train.data.rows import plan_rows
from k3train.data.store import open_store

from .conftest import quiet

B = 8


@pytest.fixture(params=["concat", "best_fit"])
def config(make_config, request):
    return make_config(packing=request.param)


def plan(store, config) -> RowPlan:
    return plan_rows(store, config.packing, config.sequence_length)


def take(count: int, store, config, start: int = 0, rows: int = B, **options) -> list[Batch]:
    loader = Loader(plan(store, config), config, Course.steady(rows, config.sequence_length, start), 11, **options)
    batches = [next(loader) for _ in range(count)]
    loader.close()
    return batches


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def assert_equal(left: Batch, right: Batch) -> None:
    for name, a, b in zip(Batch._fields, left, right, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("length", [1, 7, 32, 500])
def test_rows_equal_the_obvious_cut(store, length):
    """Token by token, from the documents themselves."""
    split = store.train
    tokens = split.read(0, split.tokens)
    document = np.repeat(np.arange(split.documents), np.diff(split.doc_offsets))
    chunks = Chunks(split, length)
    rows, batch = chunks.rows, chunks.cut(np.arange(chunks.rows))
    assert [array.dtype for array in batch] == [np.int32, np.int32, np.int32, bool]
    for row in range(rows):
        seen: list[int] = []
        for place in range(length):
            at = row * length + place
            if document[at] not in seen:
                seen.append(document[at])
            supervised = document[at + 1] == document[at]
            assert batch.tokens[row, place] == tokens[at]
            assert batch.segment_ids[row, place] == len(seen)
            assert batch.loss_mask[row, place] == supervised
            assert batch.targets[row, place] == (tokens[at + 1] if supervised else 0)
    assert rows * length + 1 + chunks.dropped == split.tokens


def test_a_document_longer_than_the_row_goes_on(store):
    chunks = Chunks(store.train, 16)
    batch = chunks.cut(np.arange(chunks.rows))
    assert (batch.segment_ids.max(axis=1) == 1).any()
    assert (batch.segment_ids[:, 0] == 1).all()


def test_fewer_tokens_than_a_row(tmp_path, make_config):
    (tmp_path / "a.txt").write_text("short")
    config = make_config([tmp_path / "a.txt"], sequence_length=7)
    store = prepare(config, say=quiet)
    with pytest.raises(UserError, match=r"7 tokens are fewer than one row \(data.sequence_length 7 \+ 1\)"):
        Loader(plan(store, config), config, Course.steady(1, 7), 0)
    assert Chunks(store.train, 6).rows == 1
    config = make_config([tmp_path / "a.txt"], sequence_length=6)
    (batch,) = take(1, store, config, rows=4)  # the one row is read again and again
    assert (batch.tokens == batch.tokens[:1]).all() and batch.tokens.shape == (4, 6)
    with pytest.raises(UserError, match=r"the data is used up"):
        take(1, store, config.model_copy(update={"max_epochs": 3}), rows=4)


def test_batches_are_the_rows_of_their_samples(store, config):
    rows_of = plan(store, config)
    order = RowOrder(rows_of.rows, 11)
    for step, batch in enumerate(take(5, store, config)):
        _, rows = order.row_of(np.arange(step * B, (step + 1) * B))
        assert_equal(batch, rows_of.cut(rows))


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_processes_together_read_the_same_batches(store, config, processes):
    whole = take(40, store, config)
    parts = [take(40, store, config, part=p, parts=processes) for p in range(processes)]
    for step, batch in enumerate(whole):
        together = joined([part[step] for part in parts])
        assert_equal(batch, together)
        assert batch_hash(batch) == batch_hash(together)


@pytest.mark.parametrize("start", [1, 3, 8, 17])
def test_resume_anywhere(store, config, start):
    whole = joined(take(40, store, config))
    resumed = joined(take(30, store, config, start))
    assert_equal(resumed, Batch(*(array[start : start + 30 * B] for array in whole)))


def test_far_starts_cost_no_reading(store, config):
    loader = Loader(plan(store, config), config, Course.steady(B, 32, 10**12), 11)
    next(loader)
    assert loader.position == (10**12 + B) * 32
    loader.close()


def test_another_batch_size_reads_the_same_samples(store, config):
    whole = joined(take(6, store, config))
    assert_equal(joined(take(16, store, config, rows=3)), whole)


def test_every_row_once_an_epoch(store, config):
    rows_of = plan(store, config)
    loader = Loader(rows_of, config, Course.steady(1, 32), 3)
    tokens = np.concatenate([next(loader).tokens for _ in range(rows_of.rows)])
    loader.close()
    whole = rows_of.cut(np.arange(rows_of.rows)).tokens
    np.testing.assert_array_equal(np.sort(tokens.view("V128"), axis=0), np.sort(whole.view("V128"), axis=0))
    assert loader.epochs == {"": 1}


def test_data_exhausted_at_the_same_batch_everywhere(store, make_config):
    config = make_config(max_epochs=2)
    whole = (Chunks(store.train, 32).rows * 2) // B
    for start, options in ((0, {}), (0, {"part": 1, "parts": 2}), (B, {})):
        loader = Loader(plan(store, config), config, Course.steady(B, 32, start), 0, **options)
        for _ in range(whole - start // B):
            next(loader)
        with pytest.raises(UserError, match=r"2 epoch\(s\) of \d+ rows") as error:
            next(loader)
        assert error.value.exit_code is ExitCode.DATA_EXHAUSTED
        loader.close()


def test_start_past_the_end(store, make_config):
    loader = Loader(Chunks(store.train, 32), make_config(max_epochs=1), Course.steady(B, 32, 10**6), 0)
    with pytest.raises(UserError, match="the data is used up"):
        next(loader)


def test_processes_must_divide_the_batch(store, config):
    with pytest.raises(UserError, match="global batch of 8 rows does not divide into 3 parts"):
        Loader(plan(store, config), config, Course.steady(B, 32), 0, 0, 3)


def test_damage_found_while_reading_ahead_surfaces(store, config):
    damaged = open_store(store.path)
    damaged.train.counts = damaged.train.counts.model_copy(update={"max_id": 5})
    loader = Loader(plan(damaged, config), config, Course.steady(B, 32), 0)
    with pytest.raises(UserError, match="a file is damaged"):
        next(loader)
    loader.close()


def test_a_file_that_shrinks_under_a_run_ends_it_with_a_message(store, config, tmp_path):
    """A mapped file would end the process with SIGBUS. Asked again, the loader says it again and does not hang."""
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy)
    loader = Loader(plan(open_store(copy), config), config, Course.steady(B, 32), 0)
    next(loader)
    for shard in (copy / "train").glob("tokens-*.bin"):
        os.truncate(shard, 100)
    says = r"tokens-\d+.bin: ends at byte \d+, and ids up to byte \d+ were asked for: it was cut short"
    with pytest.raises(UserError, match=says) as error:
        for _ in range(config.prefetch + 2):
            next(loader)
    assert error.value.exit_code is ExitCode.CONFIG
    with pytest.raises(UserError, match="was cut short"):
        next(loader)
    loader.close()


@pytest.mark.parametrize(
    ("error", "surfaces", "says"),
    [
        (OSError(5, "Input/output error"), UserError, r"cannot be read at byte \d+ \(Input/output error\)"),
        (MemoryError("no memory"), MemoryError, "no memory"),
    ],
)
def test_what_befalls_the_reading_thread_surfaces(store, config, monkeypatch, error, surfaces, says):
    def fails(*_):
        raise error

    loader = Loader(plan(store, config), config, Course.steady(B, 32), 0)
    next(loader)
    monkeypatch.setattr(token_reader.os, "pread", fails)
    with pytest.raises(surfaces, match=says):
        for _ in range(config.prefetch + 2):
            next(loader)
    loader.close()


def test_hash_is_of_ids_and_their_places(store, config):
    batch, other = take(2, store, config)
    assert batch_hash(batch) != batch_hash(other)
    assert batch_hash(batch) != batch_hash(Batch(*(array[::-1] for array in batch)))
    assert batch_hash(batch) == batch_hash(batch._replace(tokens=batch.tokens.astype(np.int64)))
    small = Batch(*(np.arange(6, dtype=np.int32).reshape(2, 3),) * 4)
    assert batch_hash(small) == "6b11bc85e92f84a5"


@pytest.mark.parametrize("length", [5, 32, 10_000])
@pytest.mark.parametrize("rows", [1, 4])
def test_holdout_scores_every_target_once(store, length, rows):
    split = store.holdout
    holdout = holdout_batches(store, length, rows)
    batches = list(holdout)
    assert len(batches) == len(holdout)
    assert {batch.tokens.shape for batch in batches} == {(rows, length)}
    whole = joined(batches)
    stream = split.read(0, split.tokens)
    starts = np.asarray(split.doc_offsets[:-1])
    np.testing.assert_array_equal(whole.targets[whole.loss_mask], np.delete(stream, starts))
    assert whole.loss_mask.sum() == holdout.supervised == split.tokens - split.documents
    assert holdout.source_bytes == store.header.holdout_split.source_bytes
    padding = whole.segment_ids == 0
    assert not whole.loss_mask[padding].any()
    assert (whole.tokens[padding] == 256).all()
    assert (~padding).sum() >= split.tokens - 1


def test_holdout_of_some_rows_counts_exactly(store):
    for max_rows in (1, 3, 10):
        holdout = holdout_batches(store, 32, 4, max_rows)
        whole = joined(list(holdout))
        assert whole.loss_mask.sum() == holdout.supervised
        assert (whole.targets[whole.loss_mask] < 256).sum() == holdout.source_bytes
        assert (whole.segment_ids[max_rows:] == 0).all()
        assert (whole.segment_ids[:max_rows] > 0).all()


def test_holdout_over_processes(store):
    whole = list(holdout_batches(store, 32, 4))
    parts = [list(holdout_batches(store, 32, 4, part=p, parts=2)) for p in range(2)]
    for batch, *halves in zip(whole, *parts, strict=True):
        assert_equal(batch, joined(halves))
    with pytest.raises(UserError, match="4 do not divide into 3 parts"):
        holdout_batches(store, 32, 4, parts=3)


def test_nothing_held_out(text_files, make_config):
    store = prepare(make_config(text_files, holdout=0.0), say=quiet)
    with pytest.raises(UserError, match="no document is held out"):
        holdout_batches(store, 32, 4)


def test_holdout_bytes_without_bos(text_files, make_config):
    store = prepare(make_config(text_files, holdout=0.2, add_bos=False), say=quiet)
    holdout = holdout_batches(store, 32, 4)
    whole = joined(list(holdout))
    assert holdout.source_bytes == store.header.holdout_split.source_bytes - store.holdout.documents
    assert (whole.targets[whole.loss_mask] < 256).sum() == holdout.source_bytes
