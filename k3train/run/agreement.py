"""All processes of a run must be one program on one experiment: who differs is named. Imports no JAX.

Nothing later would find it out: with another seed a process begins with other weights, with other data it reads other
rows, and the run goes on over what is neither the one nor the other.
"""

from collections.abc import Mapping
from typing import Any

from k3train.config.drift import derived
from k3train.config.errors import UserError
from k3train.run.identity import short

PLACES = ("run.mirror", "data.store", "data.tokenizer.path")
"""Keys that name a place on a host. They may differ: what lies there is compared, or is nobody else's."""


def refuse_difference(process: int, first: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Compare what is known here with what process 0 knows.

    Args:
      process: this process's number.
      first, own: nested maps of process 0 and of this one: the resolved config, versions, hashes.

    Raises:
      UserError: something differs but ``PLACES``; names it with both values (exit 30).
    """
    changes = [change for change in derived(first, own) if change.key not in PLACES]
    if changes:
        lines = [f"  {change.key}: {short(change.was)} there, {short(change.now)} here" for change in changes]
        raise UserError(
            f"process {process} differs from process 0, and no step was done:\n"
            + "\n".join(lines)
            + "\nStart all processes by the same command, with the same files and the same k3train"
        )
