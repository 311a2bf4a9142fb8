"""``metrics.jsonl``: one JSON object a line, append-only, true to the step a run goes on from. Imports no JAX."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from k3train.config.storage import storage
from k3train.metrics.writers.base import Value


class JsonlWriter:
    """Appends to ``path``.

    On opening, a torn last line and all lines of steps after ``keep_to`` are moved to ``<path>.attempt-N``, N being
    the attempt that wrote them: the steps will be done and written anew.

    Args:
      path: the file; made where absent.
      attempt: number of this attempt.
      keep_to: the step this attempt goes on from; -1 at a fresh start.

    Raises:
      UserError: storage refuses (exit 33). A line that did not fit is taken back, so that the file stays readable.
    """

    def __init__(self, path: Path, attempt: int, keep_to: int):
        self._path, self._attempt = Path(path), attempt
        self.moved = 0
        """Lines moved away on opening."""
        with storage(self._path, "open"):
            self.moved = set_aside(self._path, keep_to, attempt)
            self._file: BinaryIO | None = self._path.open("ab", buffering=0)

    def write(self, step: int, samples: int, tokens: int, values: Mapping[str, Value]) -> None:
        """Append one line; NaN and infinities become null and are named in ``nonfinite``."""
        if self._file is None:
            raise ValueError(f"{self._path} is closed")
        line: dict[str, Any] = {"step": int(step), "samples": int(samples), "tokens": int(tokens)}
        line |= {"time": round(time.time(), 3), "attempt": self._attempt}
        odd = {}
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                odd[name] = str(float(value))
                value = None
            line[name] = value
        if odd:
            line["nonfinite"] = odd
        self._append(json.dumps(line, allow_nan=False).encode() + b"\n")

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        size = os.fstat(self._file.fileno()).st_size
        with storage(self._path, "write"):
            try:
                rest = memoryview(data)
                while rest:  # a nearly full disk takes a part and refuses the rest
                    rest = rest[self._file.write(rest) or 0 :]
            except OSError:
                os.ftruncate(self._file.fileno(), size)
                raise

    def sync(self) -> None:
        """Bring what was written to the disk, so that it outlives a power cut as a checkpoint does."""
        if self._file is not None:
            with storage(self._path, "write"):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The readable lines of a metrics file; a torn last one is passed over."""
    lines = []
    for text in Path(path).read_bytes().splitlines():
        line = _parse(text)
        if line is not None:
            lines.append(line)
    return lines


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def set_aside(path: Path, keep_to: int, attempt: int) -> int:
    """Move unreadable lines and those of steps after ``keep_to`` to ``<path>.attempt-N``; returns how many.

    They are safe in their new place before the old file is replaced, so a crash in between loses nothing.
    """
    if not path.exists():
        return 0
    kept = path.with_name(f".{path.name}.part")
    moved: dict[int, list[bytes]] = {}
    with path.open("rb") as old, kept.open("wb") as new:
        for text in old:
            line = _parse(text) if text.endswith(b"\n") else None
            if line is None or line["step"] > keep_to:
                number = line.get("attempt") if line else None
                number = number if isinstance(number, int) else attempt - 1
                moved.setdefault(number, []).append(text.rstrip(b"\n") + b"\n")
            else:
                new.write(text)
        new.flush()
        os.fsync(new.fileno())
    if moved:
        for number, lines in moved.items():
            with path.with_name(f"{path.name}.attempt-{number}").open("ab") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        kept.replace(path)
    else:
        kept.unlink()
    return sum(map(len, moved.values()))
