"""Reads ids out of a file at any place. Imports no JAX.

Reads are asked for, not mapped: where a file shrinks under a run, or its disk fails, a map ends the whole process with
SIGBUS and no word of why, and a read gives an error that names the file.
"""

import os
import weakref
from pathlib import Path

import numpy as np

from k3train.config.errors import UserError


class TokenReader:
    """The ids of one file, open for as long as the reader lives; any thread may read.

    Args:
      file: little-endian ids, one after the other.
      dtype: of an id.

    Raises:
      UserError: it cannot be opened.
    """

    def __init__(self, file: Path, dtype: np.dtype):
        self._file, self._dtype = file, dtype
        try:
            self._descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror})") from error
        # Not at the interpreter's exit: a thread may be reading then.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop), of the file's dtype, [stop - start].

        Raises:
          UserError: the file ends before, or the system cannot read it.
        """
        place, size = start * self._dtype.itemsize, (stop - start) * self._dtype.itemsize
        try:
            data = os.pread(self._descriptor, size, place)
            while len(data) < size:  # one call gives 2 GiB at most
                part = os.pread(self._descriptor, size - len(data), place + len(data))
                if not part:
                    raise UserError(
                        f"{self._file}: ends at byte {place + len(data)}, and ids up to byte {place + size} were asked "
                        "for: it was cut short while it was in use. Bring the file back; a run goes on from its newest "
                        "checkpoint"
                    )
                data += part
        except OSError as error:
            raise UserError(
                f"{self._file}: cannot be read at byte {place} ({error.strerror}). Look at the disk; a run goes on "
                "from its newest checkpoint"
            ) from error
        return np.frombuffer(data, self._dtype)
