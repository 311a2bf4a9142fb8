"""The run section: where a run lives and how it starts. Imports no JAX."""

from k3train.config.section import Frozen, NonNegative, PathText, Section


class RunConfig(Section, drift="free"):
    """The run's folder, seed and start."""

    dir: PathText
    """Folder that holds everything a run leaves behind."""
    seed: Frozen[NonNegative] = 0
    """Seed of the initial weights."""
    resume: str = "auto"
    """auto: go on where the folder holds a checkpoint; must; never; or PATH@STEP of another run."""
    init_from: Frozen[PathText | None] = None
    """Run folder or checkpoint whose weights (and nothing else) the run begins with."""
    init_partial: Frozen[bool] = False
    """Let ``init_from`` lack arrays or hold others of another shape; each is named."""
