"""Per-Head Muon: momentum, orthogonalised block by block (k3-facts 9.1, K3 report section 2.5).

Shapes: matrices are [..., n, H*d]; with heads they are cut into H blocks [n, d] along the last axis.
"""

import math
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3train.kernels.newton_schulz.api import orthogonalize
from k3train.optim.config import MuonConfig
from k3train.optim.shared_out import on_whole_matrices
from k3train.parallel.trees import Path

RMS_SCALE = 0.2
"""Gives an update the root mean square of a typical Adam update, so that learning rates carry over."""

STACK_LIMIT = 2**25
"""Elements up to which arrays of one shape of blocks are joined into one batch; beyond, each fills devices alone."""


def muon(
    grads: Mapping[Path, jax.Array],
    momentum: Mapping[Path, jax.Array],
    params: Mapping[Path, jax.Array],
    heads: Mapping[Path, int],
    decay: Mapping[Path, float],
    cfg: MuonConfig,
    lr: jax.Array,
    stored: Mapping[Path, PartitionSpec] | None = None,
) -> tuple[dict[Path, jax.Array], dict[Path, jax.Array]]:
    """One step: M <- mu M + G, W <- W - lr (0.2 sqrt(max(n, m)) NS(M) + decay W).

    Args:
      grads, momentum, params: [..., n, m] float32 by path; leading axes are a batch.
      heads: blocks of each array's last axis (1: the whole matrix).
      decay: weight decay of each array.
      cfg: momentum, Nesterov, Newton-Schulz steps and dtype.
      lr: scalar.
      stored: how each array lies on the current mesh; whole where it says nothing.

    Returns:
      (change of each array, new momentum).
    """
    mu = cfg.momentum
    momentum = {path: mu * momentum[path] + grad for path, grad in grads.items()}
    directions = {path: grads[path] + mu * m for path, m in momentum.items()} if cfg.nesterov else momentum
    changes = {}
    for path, x in _orthogonalized(directions, heads, stored or {}, cfg).items():
        scale = RMS_SCALE * math.sqrt(max(x.shape[-2], x.shape[-1] // heads[path]))
        changes[path] = -lr * (scale * x + decay[path] * params[path])
    return changes, momentum


def _orthogonalized(
    directions: Mapping[Path, jax.Array],
    heads: Mapping[Path, int],
    stored: Mapping[Path, PartitionSpec],
    cfg: MuonConfig,
) -> dict[Path, jax.Array]:
    """Newton-Schulz of every block; arrays whose blocks have the same sides, in either order, share a batch."""
    run = partial(orthogonalize, steps=cfg.steps, dtype=jnp.dtype(cfg.dtype))
    out = {}
    for paths in _batches(directions, heads):
        specs = [stored.get(path, PartitionSpec()) for path in paths]
        done = on_whole_matrices(run, [directions[path] for path in paths], specs, [heads[path] for path in paths])
        out |= dict(zip(paths, done, strict=True))
    return out


def _batches(directions: Mapping[Path, jax.Array], heads: Mapping[Path, int]) -> list[list[Path]]:
    """Paths that go together, up to ``STACK_LIMIT`` elements a batch."""
    closed: list[list[Path]] = []
    open_: dict[tuple[int, ...], tuple[list[Path], int]] = {}
    for path, x in directions.items():
        sides = tuple(sorted((x.shape[-2], x.shape[-1] // heads[path])))
        paths, size = open_.get(sides, ([], 0))
        if paths and size + x.size > STACK_LIMIT:
            closed.append(paths)
            paths, size = [], 0
        open_[sides] = ([*paths, path], size + x.size)
    return closed + [paths for paths, _ in open_.values()]
