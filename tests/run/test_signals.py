"""Signals as wishes."""

import os
import signal
import subprocess
import sys

import pytest

from k3train.config.exit_codes import ExitCode
from k3train.run.environment import git_commit, versions
from k3train.run.signals import StopRequest


@pytest.mark.parametrize(
    "number, reason, code",
    [
        (signal.SIGINT, "stopped", ExitCode.STOPPED_SAVED),
        (signal.SIGTERM, "preempted", ExitCode.PREEMPTED_SAVED),
        (signal.SIGUSR2, "preempted", ExitCode.PREEMPTED_SAVED),
    ],
)
def test_one_signal(number, reason, code):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.reason == reason and stop.exit_code == code
        assert signal.Signals(number).name in stop.describe()
    assert signal.getsignal(number) is before


def test_the_first_signal_decides():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "preempted"


def test_a_second_interrupt_ends_at_once():
    script = """
import os, signal
from k3train.run.signals import StopRequest
with StopRequest():
    os.kill(os.getpid(), signal.SIGINT)
    print("going on", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130 and done.stdout == "going on\n" and "at once" in done.stderr


def test_environment(root, tmp_path):
    assert versions()["jax"].count(".") >= 2
    assert git_commit(tmp_path) is None
    commit = git_commit(root)
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
