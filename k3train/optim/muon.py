"""Per-Head Muon: momentum, orthogonalised block by block (k3-facts 9.1, K3 report section 2.5).

Shapes: matrices are [..., n, H*d]; with heads they are cut into H blocks [n, d] along the last axis.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from k3train.kernels.newton_schulz.api import orthogonalize
from k3train.optim.config import MuonConfig
from k3train.parallel.trees import Path

RMS_SCALE = 0.2
"""Gives an update the root mean square of a typical Adam update, so that learning rates carry over."""

STACK_LIMIT = 2**25
"""Elements up to which matrices of one shape are joined into one batch; beyond, each fills a device by itself."""


def muon(
    grads: Mapping[Path, jax.Array],
    momentum: Mapping[Path, jax.Array],
    params: Mapping[Path, jax.Array],
    heads: Mapping[Path, int],
    decay: Mapping[Path, float],
    cfg: MuonConfig,
    lr: jax.Array,
) -> tuple[dict[Path, jax.Array], dict[Path, jax.Array]]:
    """One step: M <- mu M + G, W <- W - lr (0.2 sqrt(max(n, m)) NS(M) + decay W).

    Args:
      grads, momentum, params: [..., n, m] float32 by path; leading axes are a batch.
      heads: blocks of each array's last axis (1: the whole matrix).
      decay: weight decay of each array.
      cfg: momentum, Nesterov, Newton-Schulz steps and dtype.
      lr: scalar.

    Returns:
      (change of each array, new momentum).
    """
    mu = cfg.momentum
    momentum = {path: mu * momentum[path] + grad for path, grad in grads.items()}
    directions = {path: grads[path] + mu * m for path, m in momentum.items()} if cfg.nesterov else momentum
    blocks = {path: split_heads(x, heads[path]) for path, x in directions.items()}
    changes = {}
    for path, block in _orthogonalized(blocks, cfg).items():
        scale = RMS_SCALE * math.sqrt(max(block.shape[-2:]))
        changes[path] = -lr * (scale * join_heads(block, heads[path]) + decay[path] * params[path])
    return changes, momentum


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., n, H*d] -> [..., H, n, d]; one head leaves the array alone."""
    if heads == 1:
        return x
    return jnp.swapaxes(x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads), -3, -2)


def join_heads(x: jax.Array, heads: int) -> jax.Array:
    """[..., H, n, d] -> [..., n, H*d]; the inverse of :func:`split_heads`."""
    if heads == 1:
        return x
    x = jnp.swapaxes(x, -3, -2)  # [..., n, H, d]
    return x.reshape(*x.shape[:-2], -1)


def _orthogonalized(blocks: Mapping[Path, jax.Array], cfg: MuonConfig) -> dict[Path, jax.Array]:
    """Newton-Schulz of every block; small arrays of blocks of one shape (or its transpose) share a batch."""
    dtype = jnp.dtype(cfg.dtype)
    out = {}
    for paths in _batches(blocks):
        if len(paths) == 1:
            out[paths[0]] = orthogonalize(blocks[paths[0]], cfg.steps, dtype)
            continue
        flat = [_wide_side(blocks[path]).reshape(-1, *sorted(blocks[path].shape[-2:])) for path in paths]
        done = orthogonalize(jnp.concatenate(flat), cfg.steps, dtype)  # [sum of batches, n, m]
        ends = [sum(len(x) for x in flat[: i + 1]) for i in range(len(flat) - 1)]
        for path, piece in zip(paths, jnp.split(done, ends), strict=True):
            lead, tall = blocks[path].shape[:-2], blocks[path].shape[-2] > blocks[path].shape[-1]
            piece = piece.reshape(*lead, *piece.shape[-2:])
            out[path] = jnp.swapaxes(piece, -1, -2) if tall else piece
    return out


def _wide_side(x: jax.Array) -> jax.Array:
    """``x`` [..., n, m] with the shorter side first."""
    return jnp.swapaxes(x, -1, -2) if x.shape[-2] > x.shape[-1] else x


def _batches(blocks: Mapping[Path, jax.Array]) -> list[list[Path]]:
    """Paths that go together: blocks of the same two sides, up to ``STACK_LIMIT`` elements a batch."""
    closed: list[list[Path]] = []
    open_: dict[tuple[int, ...], tuple[list[Path], int]] = {}
    for path, block in blocks.items():
        sides = tuple(sorted(block.shape[-2:]))
        paths, size = open_.get(sides, ([], 0))
        if paths and size + block.size > STACK_LIMIT:
            closed.append(paths)
            paths, size = [], 0
        open_[sides] = ([*paths, path], size + block.size)
    return closed + [paths for paths, _ in open_.values()]
