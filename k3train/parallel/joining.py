"""The wait for the other processes of a run: Ctrl-C ends it, it has an end of its own, and what fails is said in words.

JAX waits in C++, where Python hears no signal, and aborts with a stack trace when its time is over.
"""

import os
import signal
import threading

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.parallel import distributed

WAIT_S = 290.0
"""A little less than JAX's own limit."""


def join(peer_timeout_s: float = 30.0, wait_s: float = WAIT_S) -> None:
    """``distributed.initialize`` for the main thread; ends the process with PEER_LOST where not all come in time.

    Raises:
      UserError: as ``distributed.initialize``, and where the coordinator's address cannot be used (exit 30).
    """
    address = os.environ.get(distributed.COORDINATOR, "")
    all_of_them = f"all {os.environ.get(distributed.NUM_PROCESSES)} processes ({distributed.NUM_PROCESSES})"

    def give_up() -> None:
        text = (
            f"k3train: error: not {all_of_them} came to {address} ({distributed.COORDINATOR}) within {wait_s:g} s; "
            "look at the logs of the others, and start all of them with the same address and number\n"
        )
        os.write(2, text.encode())
        os._exit(ExitCode.PEER_LOST)

    timer = threading.Timer(wait_s, give_up)
    timer.daemon = True
    if address:
        timer.start()
    heard = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        distributed.initialize(peer_timeout_s=peer_timeout_s)
    except RuntimeError as error:
        raise UserError(
            f"{distributed.COORDINATOR}={address} cannot be used ({error}); give process 0's host and a port "
            "there that nothing else uses"
        ) from error
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, heard)
