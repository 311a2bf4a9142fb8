"""How a run ended, as a process exit code; requeue rules are a table over these. Imports no JAX."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes (k3train's own; 134 and 137 of the runtime pass through)."""

    FINISHED = 0
    BUG = 1
    USAGE = 2
    SETUP = 3
    PREEMPTED_SAVED = 10
    TIME_LIMIT_SAVED = 11
    PREEMPTED_LOST = 12
    STOPPED_SAVED = 13
    DATA_EXHAUSTED = 20
    CONFIG = 30
    CHECKPOINT = 31
    PLAN = 32
    RUN_FOLDER = 33
    NON_FINITE = 40
    WATCHDOG = 50
    PEER_LOST = 51
    SAVE_FAILED = 60


INTERRUPTED = 130
"""What an interrupted command that saves nothing ends with, as shells have it."""
