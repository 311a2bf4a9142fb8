"""The checkpoint section: when to save and what to keep. Imports no JAX."""

from k3train.config.section import Ints, NonNegative, Positive, PositiveFloat, Section


class CheckpointConfig(Section, drift="free"):
    """Saving is asynchronous; the last step is always saved.

    Nothing older is deleted before the new checkpoint was read back from storage and found whole.
    """

    every: NonNegative = 0
    """Steps between permanent checkpoints; 0 saves at the end only."""
    every_minutes: PositiveFloat | None = None
    """Minutes after the last save at which a temporary checkpoint is made; the next checkpoint replaces it."""
    keep: Positive = 2
    """Newest permanent checkpoints that stay."""
    keep_every: Positive | None = None
    """Steps whose multiples stay for good; none keeps only the newest."""
    keep_best: NonNegative = 0
    """Checkpoints of the lowest eval/holdout/loss that stay; only those evaluated at their own step count."""
    keep_steps: Ints = ()
    """Steps that are saved, and stay for good; see also ``k3train ckpt keep``."""
    max_fallback: NonNegative = 3
    """Damaged checkpoints passed over in search of a good one; beyond, the run stops with exit code 31."""
    max_failures: Positive = 3
    """Failed saves in a row after which the run stops with exit code 60."""
    timeout_minutes: PositiveFloat = 30.0
    """Minutes after which a save that has not ended counts as failed."""
