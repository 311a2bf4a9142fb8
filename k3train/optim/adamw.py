"""AdamW with decoupled decay, for everything that is not Muon's."""

from collections.abc import Mapping

import jax
import optax

from k3train.optim.config import AdamWConfig
from k3train.parallel.trees import Path


def adamw(
    grads: Mapping[Path, jax.Array],
    mu: Mapping[Path, jax.Array],
    nu: Mapping[Path, jax.Array],
    count: jax.Array,
    params: Mapping[Path, jax.Array],
    decay: Mapping[Path, float],
    cfg: AdamWConfig,
    lr: jax.Array,
) -> tuple[dict[Path, jax.Array], dict[Path, jax.Array], dict[Path, jax.Array]]:
    """One step: W <- W - lr (m / (sqrt(v) + eps) + decay W), moments corrected for their zero start.

    Args:
      grads, mu, nu, params: float32 by path; ``mu`` and ``nu`` are the first and second moments.
      count: int32, updates made before this one.
      decay: weight decay of each array.
      cfg: b1, b2, eps.
      lr: scalar.

    Returns:
      (change of each array, new mu, new nu).
    """
    state = optax.ScaleByAdamState(count=count, mu=dict(mu), nu=dict(nu))
    steps, state = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps).update(dict(grads), state)
    changes = {path: -lr * (step + decay[path] * params[path]) for path, step in steps.items()}
    return changes, state.mu, state.nu
