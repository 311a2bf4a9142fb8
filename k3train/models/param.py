"""How a part declares a parameter: shape, start, logical axes and how the optimizer treats it.

A part's ``__init__`` calls :func:`param`; the arrays stay plain (``nnx.Param``), and what else the
house needs to know about them travels as a :class:`ParamSpec` in the variable's metadata.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Init = Callable[[jax.Array, tuple[int, ...]], jax.Array]


@dataclass(frozen=True)
class ParamSpec:
    """What sharding, optimizers and the compute copy need to know about one array.

    Attributes:
      axes: logical name of each dimension (see ``parallel/axes.py``), the stack's axis left out.
      group: ``muon`` for matrices [..., in, out], ``adamw`` for the rest.
      heads: blocks into which Per-Head Muon cuts the last axis.
      decay: whether weight decay applies.
      fp32: kept in float32 in the compute copy.
    """

    axes: tuple[str | None, ...]
    group: Literal["muon", "adamw"] = "adamw"
    heads: int = 1
    decay: bool = False
    fp32: bool = False


class Buffer(nnx.Variable):
    """State that is not trained by gradient: the router bias."""


def normal(std: float) -> Init:
    """Initialiser drawing float32 from N(0, std^2)."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initialiser of float32 zeros."""
    return jnp.zeros(shape, jnp.float32)


def ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Initialiser of float32 ones."""
    return jnp.ones(shape, jnp.float32)


def param(rngs: nnx.Rngs, shape: tuple[int, ...], init: Init, axes: tuple[str | None, ...], **spec) -> nnx.Param:
    """Declares a float32 parameter; ``spec`` holds the other fields of :class:`ParamSpec`."""
    assert len(shape) == len(axes), (shape, axes)
    return nnx.Param(init(rngs.params(), shape), spec=ParamSpec(axes, **spec))


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], std: float, axes: tuple[str | None, ...], *, heads: int = 1
) -> nnx.Param:
    """Declares a matrix [..., in, out] for Muon, drawn from N(0, std^2)."""
    return param(rngs, shape, normal(std), axes, group="muon", heads=heads, decay=True)


def compute_copy(params: dict, specs: dict, dtype: jnp.dtype) -> dict:
    """The working copy of the master weights: cast to ``dtype``, but for those declared ``fp32``."""
    return jax.tree.map(
        lambda spec, p: p if spec.fp32 else p.astype(dtype),
        specs,
        params,
        is_leaf=lambda leaf: isinstance(leaf, ParamSpec),
    )
