"""Saves that fail, hang or meet a full disk; what is deleted, and when."""

import threading
import time

import pytest
from small_state import META, biggest, flip, make_state

from k3train.checkpoint import layout
from k3train.checkpoint import save as save_module
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager
from k3train.config.exit_codes import ExitCode


@pytest.fixture
def notes():
    return []


@pytest.fixture
def manager(tmp_path, notes):
    return CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=2), note=notes.append)


def polled(manager):
    while not manager.poll():
        time.sleep(0.005)


def full(*args):
    raise OSError(28, "No space left on device")


def test_an_async_failure_surfaces_once_and_is_counted(manager, monkeypatch):
    state = make_state()
    manager.save(5, state, META, block=True)
    monkeypatch.setattr(save_module, "write_manifest", full)
    for failures in (1, 2, 3):
        manager.save(10, state, META)
        with pytest.raises(
            SaveFailed, match=r"step 10 failed.*No space left.*newest good checkpoint is step 5"
        ) as caught:
            polled(manager)
        assert caught.value.exit_code == ExitCode.SAVE_FAILED and caught.value.step == 10
        assert manager.failures == failures and manager.exhausted == (failures == 3)
        assert manager.poll() and manager.steps() == [5]
    monkeypatch.undo()
    manager.save(10, state, META, block=True)  # the leftovers are replaced
    assert manager.steps() == [5, 10] and manager.failures == 0
    assert sorted(entry.name for entry in manager.directory.iterdir()) == ["10", "5"]


def test_a_failure_nobody_polled_is_told_by_the_next_save(manager, notes, monkeypatch):
    monkeypatch.setattr(save_module, "write_manifest", full)
    manager.save(10, make_state(), META)
    manager._pending.join()
    monkeypatch.undo()
    manager.save(20, make_state(), META, block=True)
    assert manager.steps() == [20] and any("WARNING" in note and "step 10 failed" in note for note in notes)


def test_the_last_failure_allowed_is_raised_by_the_next_save(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, CheckpointConfig(max_failures=1))
    monkeypatch.setattr(save_module, "write_manifest", full)
    manager.save(10, make_state(), META)
    manager._pending.join()
    with pytest.raises(SaveFailed, match="step 10"):
        manager.save(20, make_state(), META)


@pytest.mark.parametrize("where", ["begin_save", "write_manifest"])
def test_a_save_that_hangs_is_given_up_on(tmp_path, monkeypatch, where):
    """Before the arrays are copied, and after: the loop goes on, and what ends late does no harm."""
    go, really = threading.Event(), getattr(save_module, where)
    manager = CheckpointManager(tmp_path, CheckpointConfig(timeout_minutes=0.5 / 60))
    monkeypatch.setattr(save_module, where, lambda *args: (go.wait(30), really(*args))[1])
    began = time.monotonic()
    with pytest.raises(SaveFailed, match=r"not ended after .* minutes and was given up on"):
        manager.save(10, make_state(), META)
        polled(manager)
    assert time.monotonic() - began < 10 and manager.failures == 1
    hung = next(thread for thread in threading.enumerate() if thread.name == "save-10")
    monkeypatch.undo()
    manager._config = CheckpointConfig()
    manager.save(20, make_state(), META, block=True)
    go.set()
    hung.join(30)
    assert not hung.is_alive()
    assert ("given up on" in str(hung.error)) if where == "begin_save" else (hung.good and manager.verify(10) == [])
    assert 20 in manager.steps() and manager.newest_good() == 20
    manager.save(30, make_state(), META, block=True)
    assert not [entry.name for entry in tmp_path.iterdir() if not entry.name.isdigit()]


def test_a_late_save_leaves_the_one_under_way_alone(tmp_path, monkeypatch):
    """A save that hung before it chose its folder clears leftovers late: not those of the save that took its place."""
    go, on, really, write = threading.Event(), threading.Event(), save_module.begin_save, save_module.write_manifest
    manager = CheckpointManager(tmp_path, CheckpointConfig(timeout_minutes=0.5 / 60))
    monkeypatch.setattr(save_module, "begin_save", lambda *args: (go.wait(30), really(*args))[1])
    with pytest.raises(SaveFailed):
        manager.save(10, make_state(), META)
    hung = next(thread for thread in threading.enumerate() if thread.name == "save-10")
    monkeypatch.setattr(save_module, "begin_save", really)
    monkeypatch.setattr(save_module, "write_manifest", lambda *args: (on.wait(30), write(*args))[1])
    manager._config = CheckpointConfig()
    manager.save(10, make_state(), META)
    while not (tmp_path / "10" / "_CHECKPOINT_METADATA").exists():
        time.sleep(0.005)
    go.set()
    hung.join(30)
    on.set()
    manager.wait()
    assert not hung.good and manager.verify(10) == [] and manager.steps() == [10]


def test_what_was_written_wrongly_is_found_before_anything_is_deleted(manager, monkeypatch):
    """The file system changes a bit behind our back, between the save and the reading back."""
    manager._config = CheckpointConfig(keep=1)
    manager.save(5, make_state(), META, block=True)
    really = save_module.write_manifest

    def write_then_rot(folder, content):
        really(folder, content)
        flip(biggest(folder))

    monkeypatch.setattr(save_module, "write_manifest", write_then_rot)
    with pytest.raises(SaveFailed, match=r"read back after the save.*SHA-256 differs"):
        manager.save(10, make_state(), META, block=True)
    assert manager.steps() == [5] and (manager.directory / "10" / "quarantined.json").exists()
    monkeypatch.undo()
    manager.save(15, make_state(), META, block=True)
    assert manager.steps() == [15]


def test_a_step_is_never_saved_twice(manager):
    state = make_state()
    manager.save(10, state, META, block=True)
    with pytest.raises(SaveFailed, match="complete checkpoint already"):
        manager.save(10, state, META, block=True)
    assert manager.verify(10) == []


def test_nothing_is_deleted_before_the_newer_save_is_verified(manager, monkeypatch):
    state, go, really = make_state(), threading.Event(), save_module.verify_share
    manager._config = CheckpointConfig(keep=1)
    manager.save(10, state, META, block=True)
    monkeypatch.setattr(save_module, "verify_share", lambda *a, **k: (go.wait(10), really(*a, **k))[1])
    manager.save(20, state, META)
    while manager.steps() != [10, 20]:
        time.sleep(0.005)
    assert not manager.poll() and manager.newest_verified == 10
    go.set()
    manager.wait()
    assert manager.steps() == [20] and manager.newest_verified == 20


def test_retention(tmp_path):
    config = CheckpointConfig(every=10, keep=2, keep_every=40, keep_best=1, keep_steps=(30,))
    manager = CheckpointManager(tmp_path, config)
    state = make_state()
    for step in range(10, 110, 10):
        manager.note_score(step, abs(step - 21.0))
        manager.save(step, state, META)
        manager.wait()
        if step == 70:
            layout.mark(tmp_path / "50" if (tmp_path / "50").exists() else tmp_path / "60", layout.KEEP, "asked for")
    manager.save(105, state, META, kind="temporary", block=True)
    assert manager.steps() == [20, 30, 40, 60, 80, 90, 100, 105]
    manager.save(106, state, META, kind="temporary", block=True)
    assert manager.steps() == [20, 30, 40, 60, 80, 90, 100, 106]


def test_should_save(tmp_path, monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    by_steps = CheckpointManager(tmp_path, CheckpointConfig(every=5, keep_steps=(7,)))
    assert [step for step in range(11) if by_steps.should_save(step, 0.0)] == [5, 7, 10]
    by_time = CheckpointManager(tmp_path, CheckpointConfig(every=4, every_minutes=2.0))
    assert by_time.should_save(1, 880.0) == "temporary" and by_time.should_save(1, 881.0) is None
    assert by_time.should_save(4, 880.0) == "permanent"
    assert CheckpointManager(tmp_path, CheckpointConfig()).should_save(5, 0.0) is None
