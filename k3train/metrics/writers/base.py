"""What a metrics writer is. Imports no JAX."""

from collections.abc import Mapping
from typing import Protocol

Value = float | int | str | bool | None


class Writer(Protocol):
    """Takes the metrics of a step; process 0 only."""

    def write(self, step: int, samples: int, tokens: int, values: Mapping[str, Value]) -> None:
        """Record metrics of ``step``; names are those of ``metrics/names.py``. May be called several times a step."""
        ...

    def close(self) -> None:
        """Finish; may be called twice."""
        ...
