"""Attention residuals: which sub-layers open a block, and counts (k3-facts 4). Imports no JAX."""

from typing import Literal

from k3train.config.section import Positive, Section


class AttnResidualConfig(Section, drift="frozen"):
    """How sub-layers read the depth: block or full attention residuals, or plain residual addition."""

    kind: Literal["block", "full", "none"] = "block"
    """Rows by block of layers, one for every sub-layer, or plain addition."""
    block_size: Positive = 12
    """Decoder layers in a block (the release's unit; papers count sub-layers)."""

    def block_starts(self, layers: int) -> tuple[tuple[bool, bool], ...]:
        """For each layer: whether its (mixer, feed-forward) sub-layer opens a new block."""
        if self.kind == "full":
            return ((True, True),) * layers
        return tuple((self.kind == "block" and i % self.block_size == 0, False) for i in range(layers))

    def rows(self, layers: int) -> int:
        """Rows of the bank after the last layer."""
        return sum(mixer + ffn for mixer, ffn in self.block_starts(layers))

    def parameters(self, hidden: int, layers: int) -> int:
        """Trainable elements: a norm and a query a sub-layer, and one pair for the output."""
        return 0 if self.kind == "none" else 2 * hidden * (2 * layers + 1)
