"""What a cross-section rule reports. Imports no JAX."""

from collections.abc import Iterable
from typing import NamedTuple


class Fault(NamedTuple):
    """One broken rule.

    Attributes:
      keys: dotted names of the values that do not go together, the likeliest culprit first.
      problem: what is wrong, with the values.
      fix: what would mend it.
    """

    keys: tuple[str, ...]
    problem: str
    fix: str


class RuleError(ValueError):
    """Broken rules, all at once; a ``ValueError``, so that pydantic reports it."""

    def __init__(self, faults: Iterable[Fault]):
        self.faults = tuple(faults)
        super().__init__("\n".join(f"{', '.join(f.keys)}: {f.problem}; {f.fix}" for f in self.faults))
