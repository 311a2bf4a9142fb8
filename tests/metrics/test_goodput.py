"""Goodput by hand."""

import pytest

from k3train.metrics.goodput import Attempt, attempts_of, goodput


def test_one_attempt():
    spent = goodput([Attempt(0, 10, 100.0, 200.0, {"start": 10.0, "compile": 30.0, "step": 50.0, "data": 10.0})], 200.0)
    assert spent["goodput"] == 0.5 and spent["wall"] == 100 and spent["idle"] == 0
    assert spent["compile"] == 30 and spent["rewound"] == 0


def test_rewound_steps_and_pauses_do_not_count():
    """Ten steps, back to step 4, then back once more to step 2."""
    attempts = [
        Attempt(0, 10, 0.0, 100.0, {"step": 100.0}),
        Attempt(4, 8, 150.0, 190.0, {"step": 40.0}),
        Attempt(2, 6, 200.0, 240.0, {"step": 40.0}),
    ]
    spent = goodput(attempts, 240.0)
    assert spent["step"] == pytest.approx(20 + 0 + 40)
    assert spent["rewound"] == pytest.approx(80 + 40)
    assert spent["idle"] == pytest.approx(60) and spent["goodput"] == pytest.approx(60 / 240)
    assert sum(spent[name] for name in ("step", "rewound", "idle")) == pytest.approx(spent["wall"])


def test_from_the_lines_of_attempts_jsonl():
    lines = [
        {"event": "start", "attempt": 1, "began": 1.0, "time": 5.0, "resumed_step": None},
        {"event": "lost", "attempt": 1, "time": 31.0, "step": 6, "seconds": {"step": 20.0, "start": 4.0}},
        {"event": "start", "attempt": 2, "began": 40.0, "time": 41.0, "resumed_step": 3},
        {"event": "refused", "attempt": 2, "time": 42.0, "code": 31, "seconds": {}},
        {"event": "start", "attempt": 3, "began": 50.0, "time": 51.0, "resumed_step": 3},
        {"event": "end", "attempt": 3, "time": 61.0, "step": 5, "seconds": {"step": 8.0}},
    ]
    first, second, third = attempts_of(lines)
    assert first == Attempt(0, 6, 1.0, 31.0, {"step": 20.0, "start": 4.0})
    assert second == Attempt(3, 3, 40.0, 40.0, {})  # it left nothing, so its time counts as idle
    assert third == Attempt(3, 5, 50.0, 61.0, {"step": 8.0})
    spent = goodput([first, second, third], 61.0)
    assert spent["step"] == pytest.approx(10 + 8) and spent["rewound"] == pytest.approx(10)
    assert spent["idle"] == pytest.approx(60 - 18 - 10 - 4)


def test_nothing_yet():
    assert goodput([], 5.0)["goodput"] == 0
