"""Signals as wishes, heard by a thread of their own."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from k3train.config.exit_codes import ExitCode
from k3train.run.environment import git_commit, versions
from k3train.run.signals import StopRequest, exit_code


def wait_for(condition, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(condition())


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, ExitCode.STOPPED_SAVED),
        (signal.SIGTERM, ExitCode.PREEMPTED_SAVED),
        (signal.SIGHUP, ExitCode.PREEMPTED_SAVED),
        (signal.SIGUSR2, ExitCode.TIME_LIMIT_SAVED),
    ],
)
def test_one_signal(number, code):
    ours = signal.signal(number, signal.default_int_handler)  # whoever started the tests may ignore it (nohup)
    before, wakeup = signal.getsignal(number), signal.set_wakeup_fd(-1)
    with StopRequest() as stop:
        assert not stop and stop.pending() == 0
        os.kill(os.getpid(), number)
        assert wait_for(lambda: stop)
        name = signal.Signals(number).name
        assert stop.name == name and name in stop.describe() and stop.pending() > 0
        assert exit_code(name, kept=True) == code
        assert exit_code(name, kept=False) == ExitCode.PREEMPTED_LOST
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(wakeup) == -1
    signal.signal(number, ours)


def test_a_user_who_stops_a_run_that_has_not_begun_loses_nothing():
    assert exit_code("SIGINT", kept=False, began=False) == ExitCode.STOPPED_SAVED
    assert exit_code("SIGTERM", kept=False, began=False) == ExitCode.PREEMPTED_LOST


def test_the_first_signal_decides():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(lambda: stop)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.05)
        assert stop.name == "SIGTERM"


def test_with_other_processes_term_is_left_alone_and_the_rest_is_forwarded():
    heard = []
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(forward=heard.append) as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        os.kill(os.getpid(), signal.SIGUSR2)
        assert wait_for(lambda: heard)
    assert heard == ["SIGUSR2"] and stop.name == "SIGUSR2"


def test_a_second_interrupt_ends_at_once_even_when_the_main_thread_is_stuck():
    script = """
import os, signal, threading, time
from k3train.run.signals import StopRequest
with StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGINT)
    while not stop: time.sleep(0.01)
    print("going on", flush=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    import ctypes
    ctypes.CDLL(None).sleep(30)  # C code, in which Python's own handlers do not run; it ends early by the signal
    ctypes.CDLL(None).sleep(30)
    print("not reached", flush=True)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130 and done.stdout == "going on\n" and "at once" in done.stderr
    assert time.monotonic() - began < 25


def test_an_interrupt_that_comes_twice_at_one_moment_is_one():
    """``timeout -s INT`` signals its child, then the child's group."""
    with StopRequest() as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)  # apart enough to be heard one by one
        assert wait_for(lambda: stop) and stop.name == "SIGINT"


def test_a_closed_terminal_that_was_to_be_ignored_is_ignored():
    """``nohup k3train ...``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.05)
            assert not stop
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_heard_though_nobody_reads_standard_error_any_more():
    """Ctrl-C ends the ``tee`` behind the pipe too, and what cannot be said must not keep the stop away."""
    script = """
import os, signal, time
from k3train.run.signals import StopRequest
with StopRequest() as stop:
    stop.at_once = lambda: print("recorded", flush=True)
    for said in ("heard", "not reached"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
        print(said if stop.name == "SIGINT" else "lost", flush=True)
"""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert done.returncode == 130 and done.stdout == "heard\nrecorded\n"


def test_before_anything_is_begun_a_batch_system_hears_that_it_may_requeue():
    script = """
import os, signal
from k3train.run.signals import nothing_to_save
with nothing_to_save():
    pass
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
with nothing_to_save():
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (ExitCode.PREEMPTED_LOST, "") and "SIGTERM" in done.stderr


def test_no_thread_is_left():
    before = threading.active_count()
    with StopRequest():
        assert threading.active_count() == before + 1
    assert wait_for(lambda: threading.active_count() == before)


def test_environment(root, tmp_path):
    assert versions()["jax"].count(".") >= 2
    assert git_commit(tmp_path) is None
    commit = git_commit(root)
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
