"""What every metrics writer must do; a member gives ``open`` and ``read`` and inherits the tests."""

import abc
import math
from pathlib import Path
from typing import Any

import pytest

from k3train.metrics.writers.base import Writer


class WriterBattery(abc.ABC):
    """Subclasses are named Test...; ``read`` returns dicts with step, samples, tokens and the metrics."""

    @abc.abstractmethod
    def open(self, folder: Path, attempt: int = 1, keep_to: int = -1) -> Writer: ...

    @abc.abstractmethod
    def read(self, folder: Path) -> list[dict[str, Any]]: ...

    def write_steps(self, folder: Path, first: int, last: int, attempt: int = 1, keep_to: int = -1) -> None:
        writer = self.open(folder, attempt, keep_to)
        for step in range(first, last + 1):
            writer.write(step, 8 * step, 64 * step, {"train/loss": 4.0 - step / 8})
        writer.close()

    def test_what_is_written_is_read(self, tmp_path):
        self.write_steps(tmp_path, 1, 3)
        lines = self.read(tmp_path)
        assert [(line["step"], line["samples"], line["tokens"]) for line in lines] == [
            (1, 8, 64),
            (2, 16, 128),
            (3, 24, 192),
        ]
        assert [line["train/loss"] for line in lines] == [3.875, 3.75, 3.625]

    def test_values_without_a_number(self, tmp_path):
        writer = self.open(tmp_path)
        writer.write(
            1, 8, 64, {"train/loss": math.nan, "train/grad_norm": math.inf, "perf/mfu": None, "moe/maxvio": 0.5}
        )
        writer.close()
        (line,) = self.read(tmp_path)
        assert line["moe/maxvio"] == 0.5
        assert all(line.get(name) is None for name in ("train/loss", "train/grad_norm", "perf/mfu"))

    def test_going_on_from_an_older_step(self, tmp_path):
        self.write_steps(tmp_path, 1, 5)
        self.write_steps(tmp_path, 4, 6, attempt=2, keep_to=3)
        assert [line["step"] for line in self.read(tmp_path)] == [1, 2, 3, 4, 5, 6]

    def test_closing(self, tmp_path):
        writer = self.open(tmp_path)
        writer.close()
        writer.close()
        with pytest.raises(ValueError, match="closed"):
            writer.write(1, 1, 1, {})
