"""Rows of whole documents: nothing lost, nothing twice, as tight as best-fit decreasing, and the same every time."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.data.best_fit import FOLDER, BestFit, best_fit, plan
from k3train.data.prepare import prepare

from .conftest import quiet


def one_by_one(sizes: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing as it is defined: room left in each bin."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - size)
        else:
            rooms.append(capacity - size)
    return sorted(rooms)


@given(st.integers(2, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_bins_are_those_of_best_fit_decreasing(case):
    capacity, sizes = case
    bins = best_fit(np.array(sizes, np.int64), capacity)
    assert bins.shape == (len(sizes),)
    filled = np.bincount(bins, weights=sizes).astype(int) if sizes else np.zeros(0, int)
    assert sorted((capacity - filled).tolist()) == one_by_one(sizes, capacity)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 20))
def test_every_target_is_in_one_row_once(lengths, sequence_length):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = plan(offsets, sequence_length)
    lost = np.ones(offsets[-1], int)
    lost[offsets[:-1]] = 0  # the first token of a document is no target
    for row in range(len(table.rows) - 1):
        stretches = table.stretches[table.rows[row] : table.rows[row + 1]]
        assert 2 <= sum(stop - start for start, stop in stretches) <= sequence_length + 1
        assert stretches[:, 0].tolist() == sorted(stretches[:, 0])
        for start, stop in stretches:
            document = np.searchsorted(offsets, start, side="right") - 1
            assert stop <= offsets[document + 1]
            if offsets[document + 1] - offsets[document] <= sequence_length + 1:
                assert (start, stop) == (offsets[document], offsets[document + 1])  # whole
            lost[start + 1 : stop] -= 1
    assert not lost.any()


def test_rows_of_a_store(store):
    rows = BestFit(store.train, 32, pad_id=store.pad_id)
    batch = rows.cut(np.arange(rows.rows))
    padding = batch.segment_ids == 0
    assert (batch.tokens[padding] == 256).all() and not batch.loss_mask[padding].any()
    assert np.isclose(rows.padding, padding.mean()) and f"{padding.mean():.2%}" in rows.summary
    stream = store.train.read(0, store.train.tokens)
    targets = np.delete(stream, np.asarray(store.train.doc_offsets[:-1]))
    np.testing.assert_array_equal(np.sort(batch.targets[batch.loss_mask]), np.sort(targets))


def test_a_plan_is_kept_read_again_and_made_anew_where_it_is_damaged(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "store", ignore=shutil.ignore_patterns(FOLDER))
    split = type(store)(tmp_path / "store", store.header).train
    first = BestFit(split, 32).table
    (kept,) = (tmp_path / "store" / FOLDER).iterdir()
    inode = kept.stat().st_ino
    again = BestFit(split, 32)
    np.testing.assert_array_equal(again.table.stretches, first.stretches)
    assert kept.stat().st_ino == inode
    content = bytearray((kept / "stretches.bin").read_bytes())
    content[5] ^= 1
    (kept / "stretches.bin").write_bytes(content)
    np.testing.assert_array_equal(BestFit(split, 32).table.stretches, first.stretches)
    assert kept.stat().st_ino != inode and BestFit(split, 32).rows == again.rows
    assert len(list((tmp_path / "store" / FOLDER).iterdir())) == 1
    BestFit(split, 64).table
    assert len(list((tmp_path / "store" / FOLDER).iterdir())) == 2


@pytest.mark.parametrize("about", ["[]", "null", "{}", "1", "{"])
def test_what_says_nothing_of_a_plan_is_no_plan(store, tmp_path, about):
    shutil.copytree(store.path, tmp_path / "store", ignore=shutil.ignore_patterns(FOLDER))
    split = type(store)(tmp_path / "store", store.header).train
    first = BestFit(split, 32).table
    (kept,) = (tmp_path / "store" / FOLDER).iterdir()
    assert kept.stat().st_mode & 0o777 == (tmp_path / "store" / FOLDER).stat().st_mode & 0o777
    (kept / "plan.json").write_text(about)
    np.testing.assert_array_equal(BestFit(split, 32).table.rows, first.rows)
    assert "sha256" in (kept / "plan.json").read_text()


def test_a_row_longer_than_all_tokens(store):
    with pytest.raises(UserError, match="are fewer than one row"):
        _ = BestFit(store.train, 2**62).rows
    assert best_fit(np.array([1, 1, 3]), 2**62).tolist() == [0, 0, 0]


def test_a_place_that_cannot_be_written_is_said(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "store", ignore=shutil.ignore_patterns(FOLDER))
    split = type(store)(tmp_path / "store", store.header).train
    (tmp_path / "store" / FOLDER).write_text("in the way")
    said: list[str] = []
    assert BestFit(split, 32, say=said.append).rows and "made anew at every start" in said[0]


def test_documents_of_one_token(tmp_path, make_config):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    config = make_config([tmp_path / "a.txt", tmp_path / "b.txt"], add_bos=False, add_eos=False, packing="best_fit")
    store = prepare(config, say=quiet)
    with pytest.raises(UserError, match="no document has two tokens"):
        _ = BestFit(store.train, 1).rows


def test_documents_left_out_are_counted(tmp_path, make_config):
    for name in ("a", "b", "cde"):
        (tmp_path / f"{name}.txt").write_text(name)
    config = make_config([tmp_path / f"{name}.txt" for name in ("a", "b", "cde")], add_bos=False, add_eos=False)
    store = prepare(config, say=quiet)
    assert "2 documents of one token are left out" in BestFit(store.train, 2).summary


def test_what_killed_processes_left_goes_and_what_is_being_written_stays(store, tmp_path):
    shutil.copytree(store.path, tmp_path / "store", ignore=shutil.ignore_patterns(FOLDER))
    split = type(store)(tmp_path / "store", store.header).train
    old, new = (tmp_path / "store" / FOLDER / f".train-32-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "rows.bin").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert BestFit(split, 32).rows
    assert not old.exists() and new.exists()


PROCESS = """
import sys
from k3train.data.best_fit import BestFit
from k3train.data.store import open_store
plan = BestFit(open_store(sys.argv[1]).train, 32)
print("ready", flush=True)
sys.stdin.readline()
print(plan.table.stretches.tolist() == BestFit(plan.split, 32).table.stretches.tolist(), plan.rows, flush=True)
"""


def test_several_processes_make_one_plan(store, tmp_path):
    """All at once, over a store without one."""
    shutil.copytree(store.path, tmp_path / "store", ignore=shutil.ignore_patterns(FOLDER))
    command = [sys.executable, "-c", PROCESS, str(tmp_path / "store")]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    said = [process.communicate("\n", timeout=120)[0] for process in processes]
    assert said == [f"True {BestFit(store.train, 32).rows}\n"] * 3
    assert len(list((tmp_path / "store" / FOLDER).iterdir())) == 1
