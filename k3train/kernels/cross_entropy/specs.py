"""Shapes and tolerances shared by tests and benches of cross entropy. Imports no JAX."""

from typing import NamedTuple


class Case(NamedTuple):
    """N tokens, D hidden, V vocabulary, and how they are cut."""

    tokens: int
    hidden: int
    vocab: int
    chunk: int
    token_block: int


CASES = {
    "divides": Case(32, 16, 512, 128, 8),
    "ragged": Case(37, 16, 517, 128, 10),
    "one_chunk": Case(24, 16, 100, 8192, 8192),
    "one_over": Case(16, 8, 257, 256, 16),
    "narrow_chunk": Case(16, 8, 50, 7, 5),
}

TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
"""Relative norm of the difference from the reference in float64."""
