"""A JAX profile of some steps of a run."""

from pathlib import Path

import jax


class Profiler:
    """Writes a JAX profile of a span of steps into the run folder."""

    def __init__(self, span: tuple[int, ...], folder: Path):
        self._span, self._folder = span, folder / "profile"

    def before(self, step: int) -> None:
        """Starts before the first step of the span."""
        if self._span and step == self._span[0]:
            jax.profiler.start_trace(str(self._folder))

    def after(self, step: int, outputs: dict) -> None:
        """Stops after the last."""
        if self._span and step == self._span[1]:
            jax.block_until_ready(outputs)
            jax.profiler.stop_trace()
