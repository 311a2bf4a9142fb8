"""The metrics section: how often a run reports. Imports no JAX."""

from k3train.config.section import Ints, NonNegative, Positive, Section


class MetricsConfig(Section, drift="free"):
    """The run's own record is ``metrics.jsonl``."""

    every: Positive = 1
    """Steps between lines in metrics.jsonl and on a terminal that is none."""
    load_every: NonNegative = 50
    """Steps between full [layers x experts] load matrices in loads.jsonl; 0 writes none."""
    profile_steps: Ints = ()
    """First and last step of a JAX profile written to the run folder; empty writes none."""
