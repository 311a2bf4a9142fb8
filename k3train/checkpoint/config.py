"""The checkpoint section: when to save and what to keep. Imports no JAX."""

from k3train.config.section import NonNegative, Positive, Section


class CheckpointConfig(Section, drift="free"):
    """Saving is asynchronous; the last step is always saved."""

    every: NonNegative = 0
    """Steps between saves; 0 saves at the end only."""
    every_minutes: float | None = None
    """Minutes between saves, beside ``every``; none saves by steps alone."""
    keep: Positive = 2
    """Newest checkpoints that stay."""
    keep_every: Positive | None = None
    """Steps whose multiples stay for good; none keeps only the newest."""
