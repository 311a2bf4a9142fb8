"""Shapes, inputs and tolerances of causal attention, shared by tests and benchmarks. Imports no JAX."""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """B rows of T tokens, H heads, query and key width Q, value width V."""

    rows: int
    tokens: int
    heads: int
    key: int
    value: int


class Case(NamedTuple):
    """A small shape, the query rows of a block, and whether rows hold several documents."""

    shape: Shape
    block: int
    packed: bool


CASES = tuple(
    Case(Shape(2, tokens, 2, 6, 4), block, packed)
    for tokens, block, packed in ((1, 512, False), (7, 512, True), (16, 4, True), (37, 8, False), (45, 4, True))
)
"""One token, less than a block, whole blocks, a ragged last block, documents across blocks."""

QUICKSTART = (Shape(4, 256, 4, 48, 32),)
H200 = (Shape(8, 4096, 6, 192, 128), Shape(1, 8192, 96, 192, 128))

RTOL, ATOL = 2e-5, 2e-6
"""Of float32 outputs and gradients, element by element, against the reference in float32."""
BFLOAT16_OUTPUT, BFLOAT16_GRADIENT = 8e-3, 1e-2
"""Relative norm of the difference from the reference in float32 on the same rounded inputs."""


def inputs(shape: Shape, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Normal float32 q, k [B, T, H, Q], v and the cotangent do [B, T, H, V]."""
    rng = np.random.default_rng(seed)
    rows, tokens, heads, key, value = shape
    q, k = rng.normal(size=(2, rows, tokens, heads, key)).astype(np.float32)
    v, do = rng.normal(size=(2, rows, tokens, heads, value)).astype(np.float32)
    return {"q": q, "k": k, "v": v, "do": do}


def segment_ids(rows: int, tokens: int, *, mean: float = 5, seed: int = 1) -> np.ndarray:
    """[B, T] int32: documents of ``mean`` tokens on average, a third of the last row padding."""
    rng = np.random.default_rng(seed)
    ids = np.cumsum(rng.random((rows, tokens)) < 1 / mean, axis=1) + 1
    ids[-1, tokens - tokens // 3 :] = 0
    return ids.astype(np.int32)
