"""Shapes, skews and tolerances of the grouped matmul and its permutation, shared by tests and benchmarks. No JAX."""

from typing import Literal, NamedTuple

import numpy as np

Skew = Literal["even", "one_expert_first", "two_experts_empty", "last_expert"]
SKEWS: tuple[Skew, ...] = ("even", "one_expert_first", "two_experts_empty", "last_expert")


class Shape(NamedTuple):
    """N tokens with k experts each of E, L columns in and M out, rows of a block."""

    tokens: int
    top_k: int
    experts: int
    width: int
    out: int
    block: int


SMALL = tuple(
    Shape(tokens, top_k, 5, 6, 3, block) for tokens, top_k, block in ((13, 2, 4), (1, 1, 8), (9, 1, 8), (16, 3, 2))
)
"""Groups that end inside a block, one token alone, one choice a token, blocks of two."""
BLOCKS = ((0, 1, 1, 1, 4, 4, 4), (2, 2), (0,))
"""The expert of each block: groups of one and more, experts without a block, one block alone."""

QUICKSTART = (Shape(1024, 4, 16, 64, 64, 64),)
H200 = (Shape(32768, 8, 64, 384, 384, 512), Shape(8192, 16, 896, 3584, 3072, 128))

TOLERANCE = 1e-5
"""Relative and absolute, element by element, of float32 against the reference."""
BFLOAT16 = 4e-3
"""Relative norm of the difference from the reference in float32 on the same rounded inputs."""


def choices(skew: Skew, shape: Shape, *, seed: int = 0) -> np.ndarray:
    """[N, k] int32, the distinct experts of each token.

    Args:
      skew: random; all tokens alike, from expert 1 on; random among all but the last two; all alike, the last ones.
    """
    rng = np.random.default_rng(seed)
    tokens, top_k, experts = shape[:3]
    match skew:
        case "even":
            ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
        case "one_expert_first":
            ids = np.tile(np.arange(top_k) + 1, (tokens, 1))
        case "two_experts_empty":
            ids = np.argsort(rng.random((tokens, experts - 2)), axis=1)[:, :top_k]
        case "last_expert":
            ids = np.tile(np.arange(experts)[::-1][:top_k], (tokens, 1))
    return ids.astype(np.int32)
