"""metrics.jsonl: the battery, and what only a text file can suffer."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.config.errors import UserError
from k3train.metrics.writers import jsonl
from k3train.metrics.writers.jsonl import JsonlWriter, read_jsonl

_spec = importlib.util.spec_from_file_location("writer_battery", Path(__file__).with_name("battery.py"))
assert _spec and _spec.loader
_battery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_battery)


class TestJsonl(_battery.WriterBattery):
    def open(self, folder, attempt=1, keep_to=-1):
        return JsonlWriter(folder / "metrics.jsonl", attempt, keep_to)

    def read(self, folder):
        return read_jsonl(folder / "metrics.jsonl")

    def test_lines_moved_away_are_not_lost(self, tmp_path):
        self.write_steps(tmp_path, 1, 5)
        before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
        self.write_steps(tmp_path, 4, 6, attempt=2, keep_to=3)
        self.write_steps(tmp_path, 3, 3, attempt=3, keep_to=2)
        lines = self.read(tmp_path)
        assert [(line["step"], line["attempt"]) for line in lines] == [(1, 1), (2, 1), (3, 3)]
        moved = (tmp_path / "metrics.jsonl.attempt-1").read_bytes()
        assert moved == before[3] + before[4] + before[2]
        assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl.attempt-2")] == [4, 5, 6]
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "metrics.jsonl", "metrics.jsonl.attempt-1", "metrics.jsonl.attempt-2",
        ]  # fmt: skip

    def test_a_torn_last_line(self, tmp_path):
        self.write_steps(tmp_path, 1, 3)
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-20])
        writer = self.open(tmp_path, attempt=2, keep_to=3)
        assert writer.moved == 1
        writer.write(3, 24, 192, {"train/loss": 1.0})
        writer.close()
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
        assert b'"step": 3' in (tmp_path / "metrics.jsonl.attempt-1").read_bytes()

    def test_a_line_that_lacks_only_its_end(self, tmp_path):
        self.write_steps(tmp_path, 1, 2)
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-1])
        self.write_steps(tmp_path, 3, 3, attempt=2, keep_to=2)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]

    def test_nothing_to_move_leaves_the_file_as_it_is(self, tmp_path):
        self.write_steps(tmp_path, 1, 3)
        before = (tmp_path / "metrics.jsonl").stat()
        writer = self.open(tmp_path, attempt=2, keep_to=3)
        writer.close()
        assert writer.moved == 0 and (tmp_path / "metrics.jsonl").stat().st_ino == before.st_ino

    def test_lines_are_json_and_name_what_was_not_finite(self, tmp_path):
        writer = self.open(tmp_path)
        writer.write(1, 8, 64, {"train/loss": float("-inf"), "data/batch_hash": "ab12"})
        writer.close()
        text = (tmp_path / "metrics.jsonl").read_text()
        line = json.loads(text, parse_constant=lambda name: pytest.fail(name))
        assert line["nonfinite"] == {"train/loss": "-inf"} and line["data/batch_hash"] == "ab12" and line["time"] > 1e9

    def test_a_full_disk(self, tmp_path):
        """RLIMIT_FSIZE stands for a full disk: the system itself writes a part and refuses the rest."""
        script = f"""
import resource, signal
from pathlib import Path
from k3train.metrics.writers.jsonl import JsonlWriter
from k3train.config.errors import UserError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonlWriter(Path({str(tmp_path / "metrics.jsonl")!r}), 1, -1)
resource.setrlimit(resource.RLIMIT_FSIZE, (250, resource.RLIM_INFINITY))
try:
    for step in range(10):
        writer.write(step, 0, 0, {{"train/loss": 1.0}})
except UserError as error:
    print(int(error.exit_code), error)
"""
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"33 {tmp_path / 'metrics.jsonl'}: cannot write")
        content = (tmp_path / "metrics.jsonl").read_bytes()
        assert content.endswith(b"\n") and [line["step"] for line in self.read(tmp_path)] == [0, 1]

    def test_a_failed_repair_keeps_the_old_file(self, tmp_path, monkeypatch):
        self.write_steps(tmp_path, 1, 5)
        before = (tmp_path / "metrics.jsonl").read_bytes()
        monkeypatch.setattr(jsonl.os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match="no space left"):
            self.open(tmp_path, attempt=2, keep_to=3)
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
