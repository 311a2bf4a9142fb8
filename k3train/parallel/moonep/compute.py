"""The experts on padded rows: forward, and backward from inner activations (k3-facts 6.3).

The gradient of an assignment's weight is ``<w2^T dy, inner>``: so the experts' outputs are not needed in the
backward pass, and are not computed again.

Letters: P padded rows, L token width, M expert width, X experts held (own and slots).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from k3train.kernels.grouped_matmul.api import gradients, grouped_matmul
from k3train.kernels.numerics import wide
from k3train.parallel.moonep.layout import Layout

Matrices = tuple[jax.Array, jax.Array, jax.Array]
"""w1 (gate) [X, L, M], w3 (up) [X, L, M], w2 (down) [X, M, L]."""


class Experts(NamedTuple):
    """How experts compute."""

    activation: Callable[[jax.Array, jax.Array], jax.Array]
    """(gate [P, M], up [P, M]) -> inner [P, M]."""
    implementation: Literal["auto", "blocked", "reference"]
    """Of the grouped matmul."""

    def multiply(self, rows: jax.Array, matrix: jax.Array, layout: Layout) -> jax.Array:
        """Each block of rows [P, X] with its expert's matrix; blocks without rows hold zeros."""
        return grouped_matmul(rows, matrix, layout.block_expert, implementation=self.implementation)

    def forward(self, rows: jax.Array, matrices: Matrices, layout: Layout) -> jax.Array:
        """[P, L] outputs, unweighted."""
        w1, w3, w2 = matrices
        inner = self.activation(self.multiply(rows, w1, layout), self.multiply(rows, w3, layout))
        return self.multiply(inner, w2, layout)

    def backward(
        self, rows: jax.Array, d_out: jax.Array, weight: jax.Array, matrices: Matrices, layout: Layout
    ) -> tuple[jax.Array, jax.Array, Matrices]:
        """Gradients of ``weight * forward(rows)``.

        Args:
          rows: [P, L], as in the forward pass.
          d_out: [P, L], the gradient of each row's token, unweighted.
          weight: [P] wide.
          matrices, layout: as in the forward pass.

        Returns:
          (of the rows [P, L], of the weights [P] wide, of the matrices, wide).
        """
        w1, w3, w2 = matrices
        gate, up = self.multiply(rows, w1, layout), self.multiply(rows, w3, layout)
        inner, pull_activation = jax.vjp(self.activation, gate, up)
        weighted = (wide(inner) * weight[:, None]).astype(inner.dtype)
        d_inner, d_w2 = self._pull(weighted, w2, d_out, layout)  # [P, M] w2^T dy, not weighted yet
        d_weight = jnp.sum(wide(inner) * wide(d_inner), axis=1)
        d_gate, d_up = pull_activation((wide(d_inner) * weight[:, None]).astype(inner.dtype))
        from_gate, d_w1 = self._pull(rows, w1, d_gate, layout)
        from_up, d_w3 = self._pull(rows, w3, d_up, layout)
        return from_gate + from_up, d_weight, (d_w1, d_w3, d_w2)

    def _pull(self, rows: jax.Array, matrix: jax.Array, dy: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
        """Gradients of :meth:`multiply`; of the matrix wide, so that it is rounded at its home only."""
        return gradients(rows, matrix, layout.block_expert, dy, implementation=self.implementation)
