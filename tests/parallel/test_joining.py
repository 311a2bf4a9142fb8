"""Processes whose peers do not come, or whose address is taken."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from k3train.config.exit_codes import ExitCode
from k3train.parallel import distributed

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from k3train.config.errors import UserError
from k3train.parallel.joining import join
print("joining", flush=True)
try:
    join(10.0, wait_s={wait})
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def alone(port: int, wait: float) -> subprocess.Popen:
    """Process 0 of two."""
    given = {distributed.COORDINATOR: f"localhost:{port}", distributed.NUM_PROCESSES: "2", distributed.PROCESS_ID: "0"}
    command = [sys.executable, "-c", SCRIPT.format(wait=wait)]
    return subprocess.Popen(command, env=os.environ | given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def taken():
    with socket.socket() as held:
        held.bind(("localhost", 0))
        yield held


def test_peers_that_do_not_come(taken):
    port = taken.getsockname()[1]
    taken.close()
    process = alone(port, 2)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.PEER_LOST and "not all 2 processes" in said, said


def test_the_wait_can_be_interrupted(taken):
    port = taken.getsockname()[1]
    taken.close()
    process = alone(port, 60)
    assert process.stdout is not None and process.stdout.readline() == "joining\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def test_an_address_that_is_taken(taken):
    taken.listen()
    process = alone(taken.getsockname()[1], 60)
    _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.CONFIG and "nothing else uses" in said, said
