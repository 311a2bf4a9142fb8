"""The schedule's values at its ends and corners, as Python numbers and under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.optim.config import ScheduleConfig
from k3train.optim.schedule import lr_factor

TOTAL = 3.0e12  # beyond int32
COSINE = ScheduleConfig(kind="cosine", warmup=0.01, final=0.1)
WSD = ScheduleConfig(kind="wsd", warmup=0.1, decay=0.2, final=0.0, decay_shape="linear")
CASES = [
    (COSINE, 0.0, 0.0),
    (COSINE, 0.005, 0.5),
    (COSINE, 0.01, 1.0),
    (COSINE, 0.505, 0.55),
    (COSINE, 1.0, 0.1),
    (COSINE, 1.5, 0.1),
    (WSD, 0.05, 0.5),
    (WSD, 0.5, 1.0),
    (WSD, 0.8, 1.0),
    (WSD, 0.9, 0.5),
    (WSD, 1.0, 0.0),
    (WSD.model_copy(update={"decay_shape": "sqrt"}), 0.85, 0.5),
    (WSD.model_copy(update={"decay_shape": "cosine"}), 0.85, 0.5 + 0.5 * np.cos(np.pi / 4)),
    (WSD.model_copy(update={"decay": 0.0}), 0.999, 1.0),
    (ScheduleConfig(kind="constant", warmup=0.5), 0.25, 0.5),
    (ScheduleConfig(kind="constant", warmup=0.0), 0.0, 1.0),
    (ScheduleConfig(kind="cosine", warmup=1.0, final=0.3), 0.5, 0.5),
]


@pytest.mark.parametrize(("cfg", "share", "want"), CASES)
def test_values(cfg, share, want):
    got = lr_factor(cfg, share * TOTAL, TOTAL)
    assert isinstance(got, float)
    assert got == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("cfg", [COSINE, WSD, ScheduleConfig(kind="constant")], ids=lambda c: c.kind)
def test_jit_equals_python(cfg):
    compiled = jax.jit(lambda t: lr_factor(cfg, t, TOTAL))
    for share in (1e-6, 0.005, 0.3, 0.85, 1.0):
        got = compiled(jnp.float32(share * TOTAL))
        assert got.dtype == jnp.float32
        assert float(got) == pytest.approx(lr_factor(cfg, share * TOTAL, TOTAL), abs=1e-5)


def test_the_first_step_moves():
    assert lr_factor(COSINE, 4096, 10_000_000) > 0


def test_batch_size_does_not_change_the_curve():
    small = [lr_factor(COSINE, 64 * (i + 1), 6400) for i in range(100)]
    large = [lr_factor(COSINE, 128 * (i + 1), 6400) for i in range(50)]
    assert small[1::2] == large
