"""Shapes and tolerances shared by tests and benches of Newton-Schulz. Imports no JAX."""

SHAPES = ((9, 8), (12, 40), (40, 12), (3, 16, 24), (2, 4, 24, 16), (1, 7), (7, 1))
"""Matrices, tall and wide, with zero to two batch axes."""

TOLERANCE = {"float32": 5e-5, "bfloat16": 1.5e-1}
"""Largest |difference| from the float64 formula."""

SINGULAR_VALUES = (0.6, 1.25)
"""Where the singular values of five steps on a well-conditioned matrix lie."""
