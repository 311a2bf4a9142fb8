"""Bad steps: which there are, which of them change nothing, and when there are too many.

A step is bad where its loss or gradient is not finite, or where its loss or an optimizer group's update norm lies far
above its running mean. The state is a few scalars: running mean and variance of each quantity over accepted steps,
and the numbers of the last skipped steps. It is saved with the run, so that a resumed run judges as one that never
stopped, and it is computed on the device, so that all processes judge alike.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3train.optim.config import GUARD_MEMORY, GuardConfig

SIGMA_FLOOR = 0.01
"""Least standard deviation, as a share of the mean: Muon's update norm is so steady that its own would cry wolf."""


class Verdict(NamedTuple):
    """What :func:`judge` gives back."""

    accept: jax.Array
    """Whether the step's changes are made, bool scalar."""
    halt: jax.Array
    """Whether the run has to end, bool scalar."""
    state: dict[str, Any]
    """The guard's state after the step."""
    flags: dict[str, jax.Array]
    """Float32 scalars, 0 or 1: ``nonfinite``, ``spike``, ``skipped``."""
    measures: dict[str, jax.Array]
    """Float32 scalars: ``loss_mean`` (NaN before the first accepted step); ``loss_deviation`` and
    ``update_deviation/<group>``, standard deviations above the running mean; ``skipped_in_a_row``,
    ``skipped_in_window``."""


def init_guard(groups: Iterable[str]) -> dict[str, Any]:
    """The state before the first step, for the named optimizer groups."""

    def statistic() -> dict[str, jax.Array]:
        return {"mean": jnp.zeros((), jnp.float32), "variance": jnp.zeros((), jnp.float32)}

    return {
        "accepted": jnp.zeros((), jnp.int32),
        "loss": statistic(),
        "update": {group: statistic() for group in groups},
        "skipped_steps": jnp.full((GUARD_MEMORY,), -1, jnp.int32),
    }


def judge(
    cfg: GuardConfig,
    state: Mapping[str, Any],
    step: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    update_norms: Mapping[str, jax.Array],
) -> Verdict:
    """Judges one step, before its changes are made.

    Where ``cfg.spikes`` is warn the verdict does not depend on the update norms, so that XLA need not hold all
    updates, and the old optimizer state beside the new, until the last of them is known.

    Args:
      cfg: limits and policies.
      state: from :func:`init_guard` or the last step.
      step: int32 scalar, this step's number, from 1.
      loss, grad_norm: float32 scalars, before clipping.
      update_norms: float32 scalar by optimizer group: L2 norm of the change the optimizer asks for.
    """
    loss, accepted = jnp.float32(loss), state["accepted"]
    nonfinite = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
    loss_deviation, loss_spike = _deviation(state["loss"], loss, accepted, cfg.loss_sigma, cfg)
    deviations, update_spike = {}, jnp.zeros((), jnp.bool_)
    for group, norm in update_norms.items():
        deviations[group], spike = _deviation(state["update"][group], norm, accepted, cfg.update_sigma, cfg)
        update_spike |= spike
    spike = (loss_spike | update_spike) & ~nonfinite
    accept = ~nonfinite if cfg.spikes == "warn" else ~nonfinite & ~spike

    last = state["skipped_steps"]
    skipped_steps = jnp.where(accept, last, jnp.concatenate([step.astype(last.dtype)[None], last[:-1]]))
    back = step - jnp.arange(GUARD_MEMORY, dtype=last.dtype)
    in_a_row = jnp.sum(jnp.cumprod((skipped_steps == back).astype(jnp.int32)))
    in_window = jnp.sum((skipped_steps > step - cfg.window) & (skipped_steps > 0), dtype=jnp.int32)
    halt = (in_a_row > cfg.max_in_a_row) | (in_window > cfg.max_in_window)
    if cfg.nonfinite == "halt":
        halt |= nonfinite
    if cfg.spikes == "halt":
        halt |= spike

    weight = _weight(accepted, cfg.window)
    new = {
        "accepted": accepted + accept.astype(accepted.dtype),
        "loss": _moved(state["loss"], loss, accept, weight, accepted, cfg.loss_sigma, cfg),
        "update": {
            group: _moved(state["update"][group], norm, accept, weight, accepted, cfg.update_sigma, cfg)
            for group, norm in update_norms.items()
        },
        "skipped_steps": skipped_steps,
    }
    # Only a skipped step ends a run: else the counts it was saved with would end it again at once after a resume.
    halt &= ~accept
    flags = {"nonfinite": nonfinite, "spike": spike, "skipped": ~accept}
    measures = {
        "loss_mean": jnp.where(new["accepted"] > 0, new["loss"]["mean"], jnp.nan),
        "loss_deviation": loss_deviation,
        **{f"update_deviation/{group}": value for group, value in deviations.items()},
        "skipped_in_a_row": in_a_row,
        "skipped_in_window": in_window,
    }
    as_float = lambda values: {name: value.astype(jnp.float32) for name, value in values.items()}  # noqa: E731
    return Verdict(accept, halt, new, as_float(flags), as_float(measures))


def _sigma(statistic: Mapping[str, jax.Array]) -> jax.Array:
    """Standard deviation, no smaller than the floor."""
    floor = jnp.maximum(SIGMA_FLOOR * jnp.abs(statistic["mean"]), jnp.finfo(jnp.float32).tiny)
    return jnp.maximum(jnp.sqrt(statistic["variance"]), floor)


def _deviation(
    statistic: Mapping[str, jax.Array], value: jax.Array, accepted: jax.Array, limit: float | None, cfg: GuardConfig
) -> tuple[jax.Array, jax.Array]:
    """(standard deviations above the running mean, 0 before the first accepted step; whether that is a spike)."""
    deviation = jnp.where(accepted > 0, (value - statistic["mean"]) / _sigma(statistic), 0)
    if limit is None:
        return deviation, jnp.zeros((), jnp.bool_)
    known = accepted >= max(cfg.warmup_steps, 1)
    return deviation, (known & (deviation > limit)) | ~jnp.isfinite(value)


def _weight(accepted: jax.Array, window: int) -> jax.Array:
    """Weight of the next accepted value in the running mean: 1 at the first, 1 / window in the end.

    The mean so weighted is the exponential one divided by 1 - (1 - 1/window)^n, its correction for the zero start.
    """
    number = (accepted + 1).astype(jnp.float32)
    return (1 / window) / -jnp.expm1(number * math.log1p(-1 / window))


def _moved(
    statistic: Mapping[str, jax.Array],
    value: jax.Array,
    accept: jax.Array,
    weight: jax.Array,
    accepted: jax.Array,
    limit: float | None,
    cfg: GuardConfig,
) -> dict[str, jax.Array]:
    """Mean and variance after an accepted step (exponentially weighted form of Welford's update).

    A spike that is only warned of counts no more than the limit itself, so that one of them does not hide the next.
    """
    if limit is not None:
        cap = statistic["mean"] + limit * _sigma(statistic)
        value = jnp.where(accepted >= max(cfg.warmup_steps, 1), jnp.minimum(value, cap), value)
    take = accept & jnp.isfinite(value)
    off = value - statistic["mean"]
    mean = statistic["mean"] + weight * off
    variance = (1 - weight) * (statistic["variance"] + weight * off * off)
    return {
        "mean": jnp.where(take, mean, statistic["mean"]),
        "variance": jnp.where(take, variance, statistic["variance"]),
    }
