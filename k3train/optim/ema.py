"""A moving average of the weights, kept beside them."""

from typing import Any

import jax
import jax.numpy as jnp


def init_ema(params: Any) -> Any:
    """The average before the first step: a copy of the weights."""
    return jax.tree.map(jnp.copy, params)


def update_ema(average: Any, params: Any, decay: float) -> Any:
    """``decay * average + (1 - decay) * params``, array by array; call it after QK-Clip."""
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)
