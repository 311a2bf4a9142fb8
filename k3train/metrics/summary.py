"""A step's statistics, one array over layers each, as metric values (names.py says what each is). Imports no JAX.

Shapes: L layers of the kind concerned, E experts, H heads.
"""

import math
from collections.abc import Mapping

import numpy as np

from k3train.metrics.names import WORST

# Name -> which layer is the worst; None reports the mean alone.
_PLAIN = {
    "moe/router_entropy": np.min,
    "moe/rank_load": np.max,
    "moe/redundant": np.max,
    "moe/rounds": np.max,
    "kda/decay_mean": None,
    "kda/decay_min": np.min,
    "kda/beta_mean": None,
    "kda/state_rms": np.max,
    "attnres/entropy": np.min,
    "attnres/weight_max": np.max,
}


def summarize(stats: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Metric values of a step.

    Args:
      stats: any of ``moe/load`` [L, E] (assignments), ``moe/router_bias`` [L, E], ``moe/router_entropy`` [L],
        ``moe/rank_load``, ``moe/redundant``, ``moe/rounds`` [L],
        ``kda/decay_mean``, ``kda/decay_min``, ``kda/beta_mean``, ``kda/state_rms`` [L], ``attn/max_logit`` [L, H],
        ``attnres/entropy``, ``attnres/weight_max`` [L, 2]. An array without elements is passed over.

    Raises:
      KeyError: a name not in this list.
    """
    values: dict[str, float] = {}
    for name, given in stats.items():
        array = np.asarray(given, np.float64)
        if array.size == 0:
            continue
        if name == "moe/load":
            values |= load_metrics(array)
        elif name == "moe/router_bias":
            values |= _mean_and_worst("moe/bias_absmax", np.abs(array).max(-1), np.max)
        elif name == "attn/max_logit":
            values[name] = float(array.max())
        else:
            values |= _mean_and_worst(name, array, _PLAIN[name])
    return values


def load_metrics(load: np.ndarray) -> dict[str, float]:
    """Balance of the experts from ``load`` [L, E]; NaN where a layer saw no token.

    MaxVio = (largest load - mean load) / mean load (k3-facts 5; operations.md 5.1).
    """
    mean = load.mean(-1)  # [L]
    share = load / np.where(mean == 0, math.nan, mean)[:, None]  # [L, E], 1 = the mean
    dead = (load == 0).sum(-1)  # [L]
    return {
        **_mean_and_worst("moe/maxvio", share.max(-1) - 1, np.max),
        **_mean_and_worst("moe/load_min", share.min(-1), np.min),
        **_mean_and_worst("moe/load_p95", np.percentile(share, 95, axis=-1), np.max),
        "moe/dead_experts": float(dead.sum()),
        "moe/dead_experts" + WORST: float(dead.max()),
    }


def _mean_and_worst(name: str, array: np.ndarray, worst) -> dict[str, float]:
    mean = {name: float(array.mean())}
    return mean if worst is None else {**mean, name + WORST: float(worst(array))}


class Ema:
    """Bias-corrected moving average: the first value is returned as it is. Non-finite values are passed over."""

    def __init__(self, decay: float = 0.98):
        self.decay = decay
        self._sum, self._weight = 0.0, 0.0

    def update(self, value: float) -> float:
        """Take a value; returns the average (NaN before the first finite value)."""
        if math.isfinite(value):
            self._sum = self.decay * self._sum + (1 - self.decay) * value
            self._weight = self.decay * self._weight + (1 - self.decay)
        return self._sum / self._weight if self._weight else math.nan
