"""The learning-rate factor, a function of tokens seen and never of steps (k3-facts 9.2).

A changed batch size or sequence length then moves along the same curve.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3train.optim.config import ScheduleConfig


def lr_factor(cfg: ScheduleConfig, tokens_seen: float | jax.Array, total_tokens: float | jax.Array) -> Any:
    """Factor on every peak learning rate, 1 at the peak.

    Args:
      cfg: form of the curve.
      tokens_seen: tokens at the END of the step that is being taken, so that the first step of a
        warm-up moves. Under ``jit`` pass float32: int32 overflows at 2.1e9 tokens.
      total_tokens: tokens of the whole run.

    Returns:
      A Python float for Python numbers, else a float32 scalar.
    """
    traced = isinstance(tokens_seen, jax.Array) or isinstance(total_tokens, jax.Array)
    if traced:
        tokens_seen, total_tokens = jnp.float32(tokens_seen), jnp.float32(total_tokens)
        return jnp.float32(_factor(cfg, tokens_seen / jnp.maximum(total_tokens, 1), jnp))
    return float(_factor(cfg, np.float64(tokens_seen) / max(float(total_tokens), 1.0), np))


def _factor(cfg: ScheduleConfig, progress: Any, xp: Any) -> Any:
    """The factor at ``progress`` (share of the run), by NumPy or jax.numpy."""
    progress = xp.clip(progress, 0, 1)
    rise = xp.minimum(progress / cfg.warmup, 1) if cfg.warmup > 0 else 1
    match cfg.kind:
        case "cosine":
            fallen = _fall("cosine", _share(progress, cfg.warmup, xp), xp)
        case "wsd":
            fallen = _fall(cfg.decay_shape, _share(progress, 1 - cfg.decay, xp), xp)
        case "constant":
            fallen = 0 * progress
    return rise * (1 - (1 - cfg.final) * fallen)


def _share(progress: Any, start: float, xp: Any) -> Any:
    """How much of the stretch from ``start`` to the end is done, 0 to 1."""
    return xp.clip((progress - start) / max(1 - start, 1e-12), 0, 1)


def _fall(shape: str, share: Any, xp: Any) -> Any:
    """How far the factor has fallen from the peak (0) to the final value (1)."""
    match shape:
        case "linear":
            return share
        case "sqrt":
            return xp.sqrt(share)
        case _:
            return 0.5 - 0.5 * xp.cos(np.pi * share)
