"""The loss picture."""

import sys

import pytest

from k3train.config.errors import UserError
from k3train.metrics.picture import curve, eval_names, loss_picture
from k3train.metrics.writers.jsonl import JsonlWriter, read_jsonl


@pytest.fixture
def metrics(tmp_path):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path, 1, -1)
    for step in range(1, 51):
        writer.write(step, step, 64 * step, {"train/loss": float("nan") if step == 7 else 5 / step + 2})
        if step % 10 == 0:
            writer.write(step, step, 64 * step, {"eval/holdout/bpb": 3 / step + 1, "eval/holdout/loss": 1.0})
    writer.close()
    return path


def test_picture(metrics, tmp_path):
    pytest.importorskip("matplotlib")
    loss_picture([metrics], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "loss.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="no such metrics file"):
        loss_picture({"a": tmp_path / "none.jsonl"}, tmp_path / "loss.png")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="train/loss"):
        loss_picture([tmp_path / "empty.jsonl"], tmp_path / "loss.png")


def test_curves(metrics):
    lines = read_jsonl(metrics)
    tokens, losses = curve(lines, "train/loss")
    assert len(tokens) == 49 and tokens == sorted(tokens) and losses[0] == 7.0
    assert eval_names(lines) == ["eval/holdout/bpb"]
    assert eval_names([{"eval/holdout/loss": 1.0}]) == ["eval/holdout/loss"] and eval_names([{}]) == []


def test_without_matplotlib(metrics, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"k3train\[plot\]"):
        loss_picture([metrics], tmp_path / "loss.png")
