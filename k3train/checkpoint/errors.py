"""What can go wrong with a checkpoint, as the user meets it. Imports no JAX."""

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode


class CheckpointRefused(UserError):
    """A checkpoint that is absent, damaged or of another model (exit 31)."""

    def __init__(self, message: str):
        super().__init__(message, ExitCode.CHECKPOINT)


class SaveFailed(UserError):
    """A save that did not become a checkpoint (exit 60).

    Attributes:
      step: the step that was to be saved.
    """

    def __init__(self, step: int, directory: object, reason: object, failures: int = 1, newest: int | None = None):
        count = f" (save {failures} in a row that failed)" if failures > 1 else ""
        good = "no good checkpoint is known" if newest is None else f"the newest good checkpoint is step {newest}"
        super().__init__(f"{directory}: saving step {step} failed{count}: {reason}; {good}", ExitCode.SAVE_FAILED)
        self.step = step
