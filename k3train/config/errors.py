"""The one error a user is meant to see. Imports no JAX."""

from k3train.config.exit_codes import ExitCode


class UserError(Exception):
    """A fault the user can mend: the message names the place and the cure, and no traceback is shown.

    Attributes:
      exit_code: how the process ends (the table in ``config/exit_codes.py``).
    """

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.CONFIG):
        super().__init__(message)
        self.exit_code = exit_code
