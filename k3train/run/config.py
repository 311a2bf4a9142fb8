"""The run section: where a run lives, how it starts, and when it counts as stuck or dead. Imports no JAX."""

from typing import Annotated, Literal

from pydantic import Field

from k3train.config.section import Frozen, NonNegative, PathText, PositiveFloat, Section

Seconds = Annotated[float, Field(ge=0)]


class WatchdogConfig(Section, drift="free"):
    """Seconds without progress after which a phase counts as stuck; 0 never."""

    start_s: Seconds = 3600.0
    """Preparing data, making or restoring the state."""
    compile_s: Seconds = 7200.0
    """Compiling."""
    data_s: Seconds = 600.0
    """Waiting for a batch."""
    step_s: Seconds = 1200.0
    """One training step, and what the host does beside it."""
    eval_s: Seconds = 1200.0
    """One batch of an evaluation."""
    save_s: Seconds = 3600.0
    """Waiting for a checkpoint to be written."""
    sample_s: Seconds = 1200.0
    """Writing one sample text."""
    grace_s: Seconds = 60.0
    """Time between writing the stacks down and ending the process (exit 50)."""


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
    mirror: PathText | None = None
    """Folder for the mirrors of run folders in object stores; none takes ``k3train/mirror`` in the user's cache."""
    determinism: Literal["off", "strict"] = "off"
    """strict: on the same devices and software, a resumed run has the same bits as one that never stopped; slower, and
    other surroundings are refused."""
    peer_timeout_s: PositiveFloat = 30.0
    """Seconds without a sign of life after which a process of the run counts as dead and all end."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Time limits by phase."""
