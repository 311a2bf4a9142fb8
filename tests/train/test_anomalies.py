"""The line that says what was wrong with a step."""

import pytest

from k3train.optim.config import GuardConfig
from k3train.train.anomalies import describe

VALUES = {
    "train/nonfinite": 0.0, "train/spike": 1.0, "train/skipped": 0.0, "train/loss": 5.5, "train/grad_norm": 2.0,
    "train/update_norm/muon": 1.0, "guard/loss_deviation": 9.0, "guard/update_deviation/muon": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "other, said",
    [
        ({}, "spike: loss 5.5000, 9.0 standard deviations"),
        ({"train/nonfinite": 1.0, "train/loss": float("nan")}, "not finite (loss nan"),
        ({"train/update_norm/muon": float("inf")}, "the update of muon is not finite, so that the weights are lost"),
        ({"train/update_norm/muon": float("inf"), "train/skipped": 1.0}, "the update of muon is not finite; skipped"),
    ],
)
def test_what_was_wrong_is_named(other: dict, said: str):
    assert said in describe(3, VALUES | other, GuardConfig())
