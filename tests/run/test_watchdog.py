"""The watchdog tells phases apart, writes stacks before it acts, and forgives what gets on."""

import threading
from pathlib import Path

import pytest

from k3train.run.config import WatchdogConfig
from k3train.run.phases import PHASES, Phases
from k3train.run.watchdog import Watchdog, dump_stacks, limit_of

LIMITS = WatchdogConfig(data_s=10, step_s=20, save_s=30, eval_s=0, start_s=50, grace_s=0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def watched(tmp_path):
    clock, said, ended = Clock(), [], []
    phases = Phases(clock=clock)
    dog = Watchdog(LIMITS, phases, lambda phase: tmp_path / f"{phase}.txt", said.append, lambda *end: ended.append(end))
    return clock, phases, dog, said, ended


def test_every_phase_has_a_limit():
    assert {phase: limit_of(LIMITS, phase) for phase in PHASES}["restore"] == 50
    assert limit_of(LIMITS, "sample") == 1200


@pytest.mark.parametrize(("phase", "limit"), [("data", 10), ("step", 20), ("save", 30)])
def test_a_stuck_phase_is_named_with_stacks_first(watched, tmp_path, phase, limit):
    clock, phases, dog, said, ended = watched
    phases.step = 7
    phases.enter(phase)
    clock.now += limit
    dog.look()
    assert not said
    clock.now += 1
    dog.look()
    assert not ended and f"run.watchdog.{phase}_s: {limit}" in said[0] and "after step 7" in said[0]
    stacks = (tmp_path / f"{phase}.txt").read_text()
    assert "test_watchdog.py" in stacks and "Thread" in stacks
    dog.look()
    (look, reason), *rest = ended
    assert look.phase == phase and look.step == 7 and f"stuck in {phase}" in reason and not rest


def test_what_gets_on_is_left_alone(watched):
    clock, phases, dog, said, ended = watched
    phases.enter("step")
    clock.now += 21
    dog.look()
    phases.got_on()
    dog.look()
    assert "gets on" in said[1]
    phases.enter("eval")  # has no limit
    clock.now += 1e6
    dog.look()
    assert not ended and len(said) == 2


def test_stacks_go_to_standard_error_where_storage_is_stuck(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    hook, threading.excepthook = threading.excepthook, lambda args: None
    try:
        assert dump_stacks(None) == "standard error"
    finally:
        threading.excepthook = hook
    assert "test_watchdog.py" in capfd.readouterr().err
    assert Path(dump_stacks(tmp_path / "a" / "b.txt")).exists()
