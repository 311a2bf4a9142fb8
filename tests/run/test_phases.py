"""The clock of an attempt, work beside the main thread, and what status.json says of them."""

import json
import threading

import pytest

from k3train.run.aside import Aside, Every
from k3train.run.phases import PHASES, Phases
from k3train.run.status import Status, lost_line, read_status


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_goes_to_the_phase_it_was_spent_in():
    clock = Clock()
    phases = Phases(already=2.0, clock=clock)
    clock.now += 3
    phases.enter("step")
    clock.now += 5
    with phases.within("data"):
        clock.now += 7
        look = phases.look()
        assert (look.phase, look.age) == ("data", 7) and look.seconds["data"] == 7
        phases.got_on()
        assert phases.look().age == 0 and phases.look().seconds["data"] == 7
    clock.now += 1
    look = phases.look()
    assert look.phase == "step" and look.age == 1
    assert look.seconds == dict.fromkeys(PHASES, 0.0) | {"start": 5, "step": 6, "data": 7}


def test_a_phase_ends_however_its_body_does():
    phases = Phases()
    with pytest.raises(ZeroDivisionError), phases.within("eval"):
        raise ZeroDivisionError
    assert phases.look().phase == "start"


class Enough(Exception):
    pass


def test_a_call_aside_is_given_up_and_the_next_one_is_not_held_up():
    aside, gate = Aside(), threading.Event()

    def enough():
        raise Enough

    assert aside(lambda a, b: a + b, 2, 3, watch=enough) == 5
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 // 0, watch=enough)
    with pytest.raises(Enough):
        aside(gate.wait, watch=enough)
    assert aside.busy
    assert aside(lambda: "free", watch=lambda: None) == "free"
    gate.set()
    for _ in range(100):
        if not aside.busy:
            break
        threading.Event().wait(0.01)
    assert not aside.busy


def test_what_is_done_every_so_often_survives_its_errors_and_tells_each_once():
    told, calls, enough = [], [], threading.Event()

    def fail():
        calls.append(1)
        if len(calls) == 3:
            enough.set()
        raise OSError("no space")

    thread = Every("status", 0.01, fail, told.append)
    thread.start()
    assert enough.wait(5)
    thread.stop()
    assert told == ["WARNING: status: OSError: no space"]


def test_status(tmp_path):
    clock = Clock()
    phases = Phases(clock=clock)
    phases.step = 5
    status = Status(tmp_path, 2, phases, [], {"code": 10})
    status.checkpoint = lambda: 4
    phases.enter("step")
    clock.now += 8
    phases.step = 9
    status.write()
    seen = read_status(tmp_path)
    assert (seen["state"], seen["attempt"], seen["phase"], seen["step"]) == ("running", 2, "step", 9)
    assert seen["checkpoint"] == 4 and seen["last_exit"] == {"code": 10} and seen["seconds"]["step"] == 8
    assert lost_line(seen, 2) == {
        "event": "lost", "attempt": 2, "phase": "step", "step": 9, "time": seen["time"], "seconds": seen["seconds"],
    }  # fmt: skip
    assert lost_line(seen, 3) == {"event": "lost", "attempt": 3}
    status.end({"code": 0})
    status.write()  # too late: the end stays
    assert read_status(tmp_path)["state"] == "ended" and read_status(tmp_path)["last_exit"] == {"code": 0}
    (tmp_path / "status.json").write_text(json.dumps(seen)[:40])
    assert read_status(tmp_path) is None
