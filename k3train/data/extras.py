"""Packages that only some sources need, and the one message where they are missing. Imports no JAX."""

import importlib
from typing import Any

from k3train.config.errors import UserError


def need(module: str, what: str, extra: str = "data") -> Any:
    """The module.

    Args:
      module: its name, as in ``pyarrow.parquet``.
      what: what cannot be done without it.
      extra: the extra of k3train that installs it.

    Raises:
      UserError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(
            f"{what} needs the package {package}, which is not installed: pip install 'k3train[{extra}]'"
        ) from error
