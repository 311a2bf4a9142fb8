"""Several processes in one: signs of life, who died first, and the word before the first step."""

import json
import os
import socket
import subprocess
import sys
import time

import jax
import pytest

from k3train.run import peer_watch as module
from k3train.run.peer_watch import PeerWatch, born, reachable
from k3train.run.phases import Phases
from k3train.run.supervision import of_the_runtime


class Notes:
    """The coordination service, as a dict."""

    def __init__(self):
        self.kept: dict[str, str] = {}
        self.stopped = False

    def set(self, key, value, once=False):
        if once and key in self.kept:
            return False
        self.kept[key] = value
        return True

    def get(self, key):
        return self.kept.get(key)

    def stop_notice(self):
        return self.stopped

    def below(self, folder):
        return {key.split("/")[1]: value for key, value in self.kept.items() if key.startswith(f"{folder}/")}


@pytest.fixture
def three():
    notes = Notes()
    watches = [PeerWatch(notes, i, 3, 0.2, Phases()) for i in range(3)]
    heard: list[tuple[int, dict]] = []
    for i, watch in enumerate(watches):
        watch.on_failure = lambda failure, i=i: heard.append((i, failure))
    return notes, watches, heard


def forge(notes: Notes, process: int, **changes) -> None:
    """A beat as another process would have sent it."""
    beat = json.loads(notes.kept[f"beat/{process}"]) | changes
    notes.kept[f"beat/{process}"] = json.dumps(beat)


def test_all_alive(three):
    _notes, watches, heard = three
    for _ in range(3):
        for watch in watches:
            watch.beat()
        time.sleep(0.1)
    assert not heard


def test_silence_is_death_and_every_process_hears_whose(three):
    notes, watches, heard = three
    watches[2]._phases.step = 41
    watches[2]._phases.enter("data")
    for watch in watches:
        watch.beat()
    forge(notes, 2, host="far away", number=77)  # elsewhere: only silence tells
    watches[0].beat()
    assert not heard
    time.sleep(0.25)
    watches[1].beat()
    watches[0].beat()
    watches[1].beat()
    assert [i for i, _ in heard] == [0, 1]
    assert heard[0][1] == heard[1][1]
    failure = heard[0][1]
    assert (failure["process"], failure["host"], failure["step"], failure["phase"]) == (2, "far away", 41, "data")
    assert failure["code"] is None and "no sign of life" in failure["reason"]


def test_a_process_that_is_gone_is_noticed_at_once_on_its_own_host(three):
    notes, watches, heard = three
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watches[1].beat()
    forge(notes, 1, pid=other.pid, born=born(other.pid))
    watches[0].beat()
    assert not heard
    other.kill()
    while born(other.pid) is not None:  # a zombie until we ask for its code; dead all the same
        time.sleep(0.01)
    forge(notes, 1, number=2)
    watches[0].beat()
    other.communicate()
    assert heard[0][1]["process"] == 1 and heard[0][1]["pid"] == other.pid and "gone" in heard[0][1]["reason"]


def test_who_says_good_bye_while_the_beats_are_read_is_not_missed(three, monkeypatch):
    notes, watches, heard = three
    watches[1].beat()
    watches[0].beat()
    below = notes.below

    def reading(folder):
        found = below(folder)
        watches[1].part()
        return found

    notes.below = reading
    monkeypatch.setattr(module, "born", lambda pid: None)  # and is gone a moment later
    watches[0].beat()
    assert not heard


def test_a_pid_of_another_name_space_says_nothing(three):
    """A container of the same host name: its process numbers mean others here."""
    notes, watches, heard = three
    watches[1].beat()
    forge(notes, 1, pid=os.getpid(), born=12345)
    watches[0].beat()
    forge(notes, 1, pid=2**22 + 1, born=12345, number=5)
    watches[0].beat()
    assert not heard


def test_who_ends_as_planned_is_not_missed(three):
    _notes, watches, heard = three
    for watch in watches:
        watch.beat()
    watches[1].finish()
    watches[2].finish()
    watches[0].beat()
    time.sleep(0.25)
    watches[0].beat()
    assert not heard


def test_the_first_failure_stays(three):
    _notes, watches, heard = three
    first = watches[2].own_failure(30, "ConfigError: x")
    assert watches[2].fail(first) == first
    second = watches[1].fail(watches[1].own_failure(1, "later"))
    assert second == first and [failure["process"] for _, failure in heard] == [2, 2]


def test_ready_all_go_or_any_stops(three):
    notes, watches, _ = three
    for watch in watches[1:]:
        notes.set(f"ready/{watch.process}", "")
    assert watches[0].ready(lambda: None) and watches[1].ready(lambda: None)
    assert not watches[2].refuse()  # too late: it stops at the first tick, with the others
    notes.kept.pop("start")
    notes.kept.pop("ready/1")
    assert watches[2].refuse()
    assert not watches[0].ready(lambda: None)


def test_a_stop_is_told_with_the_signal_that_asked_for_it(three, monkeypatch):
    notes, watches, _ = three
    killed = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append((pid, number)))
    watches[1].forward("SIGUSR2")
    assert killed == [(os.getpid(), 15)]
    heard = []
    watches[0].on_stop = heard.append
    watches[0].beat()
    assert heard == ["SIGUSR2"]  # process 1 may be gone before the runtime tells of it
    notes.stopped = True
    watches[2].on_stop = heard.append
    watches[2].beat()
    assert heard == ["SIGUSR2", "SIGUSR2"]
    notes.kept.pop("stop")
    assert watches[0].stop_name() == "SIGTERM"


def test_process_zero_leaves_last(three, monkeypatch):
    notes, watches, _ = three
    monkeypatch.setattr(module, "_LEAVING_S", 0.3)
    began = time.monotonic()
    watches[0].part()
    assert time.monotonic() - began >= 0.3  # nobody else left, but it does not wait for ever
    notes.kept |= {"left/1": "", "left/2": ""}
    began = time.monotonic()
    watches[0].part()
    assert time.monotonic() - began < 0.2


def test_reachable():
    with socket.create_server(("localhost", 0)) as server:
        assert reachable(f"localhost:{server.getsockname()[1]}")
        port = server.getsockname()[1]
    assert not reachable(f"localhost:{port}")


@pytest.mark.parametrize(
    ("error", "want"),
    [
        (ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: lost"), True),
        (ValueError("unknown axis"), False),
        (RuntimeError("UNKNOWN: not of the runtime"), False),
    ],
)
def test_errors_of_the_runtime_wait_for_the_news_of_who_died(error, want):
    assert of_the_runtime(error) == want
