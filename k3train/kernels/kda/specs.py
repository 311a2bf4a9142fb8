"""Shapes, inputs and tolerances of the delta rule, shared by tests and benchmarks. Imports no JAX."""

from typing import Literal, NamedTuple

import numpy as np

Decay = Literal["bounded", "softplus", "strong", "none"]
DECAYS: tuple[Decay, ...] = ("bounded", "softplus", "strong", "none")


class Shape(NamedTuple):
    """B rows of T tokens, H heads, key width K, value width V."""

    rows: int
    tokens: int
    heads: int
    key: int
    value: int


QUICKSTART = (Shape(8, 256, 4, 32, 32), Shape(8, 256, 4, 64, 64))
H200 = (
    Shape(8, 4096, 6, 128, 128),
    Shape(1, 4096, 8, 128, 128),
    Shape(1, 8192, 96, 128, 128),
    Shape(4, 4096, 32, 128, 128),
)

# max|got - want| / max|want| against the recurrence in the same dtype, outputs and every gradient by itself.
TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def inputs(shape: Shape, decay: Decay, *, same_key: bool = False, seed: int = 0) -> dict[str, np.ndarray]:
    """Float64 q, k (unit rows), v, g, beta and initial_state, drawn with NumPy.

    Args:
      shape: sizes.
      decay: size of g: within (-5, 0); softplus-like, mostly small with a few near -30; near -20 in half of the
        channels and near 0 in the others, some tokens forgetting all; or exactly 0.
      same_key: all keys of a head alike up to a hundredth, and beta 1: the stiffest triangular system.
      seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    rows, tokens, heads, key, value = shape
    normal = lambda *size: rng.standard_normal(size)  # noqa: E731
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    q, k = normal(rows, tokens, heads, key), normal(rows, tokens, heads, key)
    beta = 1 / (1 + np.exp(-normal(rows, tokens, heads)))
    if same_key:
        k, beta = k[:, :1] + 0.01 * k, np.ones_like(beta)
    z = normal(rows, tokens, heads, key)
    match decay:
        case "bounded":
            g = -5 / (1 + np.exp(3 - 2 * z))
        case "softplus":
            g = -np.exp(normal(1, 1, heads, 1)) * np.logaddexp(0, 4 * z - 4)
        case "strong":
            g = np.where(np.arange(key) % 2 == 0, -20 + z, -0.01 * np.abs(z))
            g = np.where(rng.random((rows, tokens, 1, 1)) < 0.05, -200.0, g)
        case "none":
            g = np.zeros_like(z)
    state = normal(rows, heads, key, value)
    return {
        "q": unit(q),
        "k": unit(k),
        "v": normal(rows, tokens, heads, value),
        "g": g,
        "beta": beta,
        "initial_state": state,
    }
