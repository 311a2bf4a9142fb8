"""Output that may vanish (a reader that left, a full disk under a log file) without ending a run. Imports no JAX."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


class _Lasting:
    """A text stream whose failures to write are passed over."""

    def __init__(self, stream: IO[str]):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_output() -> Iterator[None]:
    """While entered, what cannot be written to standard output and error is lost, and nothing else.

    What a run has to say for good stands in its folder.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_Lasting, streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                # The interpreter flushes once more when it ends, and would turn the exit code into one of its own.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
