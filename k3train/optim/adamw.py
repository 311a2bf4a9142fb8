"""AdamW with decoupled decay, for everything that is not Muon's (optax's does not pass strict dtype promotion)."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

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
    number = (count + 1).astype(jnp.float32)
    mu = {path: cfg.b1 * mu[path] + (1 - cfg.b1) * g for path, g in grads.items()}
    nu = {path: cfg.b2 * nu[path] + (1 - cfg.b2) * g * g for path, g in grads.items()}
    unbias_mu, unbias_nu = 1 / (1 - cfg.b1**number), 1 / (1 - cfg.b2**number)
    changes = {}
    for path in grads:
        step = unbias_mu * mu[path] / (jnp.sqrt(unbias_nu * nu[path]) + cfg.eps)
        changes[path] = -lr * (step + decay[path] * params[path])
    return changes, mu, nu
