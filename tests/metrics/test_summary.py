"""Per-layer statistics become metric values."""

import math

import numpy as np
import pytest

from k3train.metrics.names import find
from k3train.metrics.summary import Ema, summarize


def test_load_by_hand():
    values = summarize({"moe/load": np.array([[4, 4, 4, 4], [16, 0, 0, 0]], np.int32)})
    assert values["moe/maxvio"] == pytest.approx((0 + 3) / 2) and values["moe/maxvio_worst"] == pytest.approx(3)
    assert values["moe/load_min"] == pytest.approx(0.5) and values["moe/load_min_worst"] == 0
    assert values["moe/load_p95_worst"] == pytest.approx(np.percentile([4, 0, 0, 0], 95))
    assert values["moe/dead_experts"] == 3 and values["moe/dead_experts_worst"] == 3


def test_a_layer_without_tokens():
    values = summarize({"moe/load": np.zeros((1, 4), np.int32)})
    assert math.isnan(values["moe/maxvio"]) and values["moe/dead_experts"] == 4


def test_every_value_is_in_the_table():
    rng = np.random.default_rng(0)
    values = summarize(
        {
            "moe/load": rng.integers(0, 9, (3, 4)),
            "moe/router_bias": np.array([[0.1, -0.4], [0.2, 0.0]], np.float32),
            "moe/router_entropy": np.array([1.0, 3.0]),
            "kda/decay_mean": np.array([0.9, 0.7]),
            "kda/decay_min": np.array([0.5, 0.1]),
            "kda/beta_mean": np.array([0.5]),
            "kda/state_rms": np.array([1.0, 3.0]),
            "attn/max_logit": np.array([[1.0, 7.0], [2.0, -3.0]]),
            "attnres/entropy": np.array([[0.0, 1.0], [2.0, 1.0]]),
            "attnres/weight_max": np.array([[1.0, 0.5], [0.5, 0.5]]),
        }
    )
    assert all(find(name) for name in values)
    assert values["moe/bias_absmax"] == pytest.approx(0.3) and values["moe/bias_absmax_worst"] == pytest.approx(0.4)
    assert values["moe/router_entropy_worst"] == 1 and values["kda/decay_min_worst"] == 0.1
    assert values["attn/max_logit"] == 7 and values["attnres/entropy"] == 1 and values["attnres/entropy_worst"] == 0
    assert "kda/decay_mean_worst" not in values and values["kda/state_rms_worst"] == 3


def test_absent_kinds_and_unknown_names():
    assert summarize({"kda/beta_mean": np.zeros(0), "attn/max_logit": np.zeros((0, 4))}) == {}
    with pytest.raises(KeyError):
        summarize({"kda/unheard_of": np.ones(2)})


def test_ema():
    ema = Ema(0.5)
    assert math.isnan(ema.update(math.nan))
    assert ema.update(4.0) == 4.0
    assert ema.update(1.0) == pytest.approx(2.0)  # (0.25 * 4 + 0.5 * 1) / 0.75
    assert ema.update(math.inf) == pytest.approx(2.0)
