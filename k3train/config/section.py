"""The base of every config section, and the field types they share. Imports no JAX.

Every key says what may become of it when a run goes on (``config/drift.py``): a section by its class argument
``drift=``, which its keys take over, and a single key by ``Frozen[int]``, ``Branch[int]`` or ``Free[int]``.
"""

import os
from enum import StrEnum
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from k3train.config.units import COUNT_PATTERN, parse_count

# Whole numbers reach arrays of 64 bits.
_LARGEST = 2**63 - 1


def _path(text: str) -> str:
    """A path with the home folder's ``~`` written out.

    Raises:
      ValueError: it has no name, or a character that no file system takes.
    """
    if not text.strip() or "\0" in text:
        raise ValueError(f"{text!r} is no path; name a file or folder")
    written_out = os.path.expanduser(text)  # noqa: PTH111 - a Path would drop a slash of gs://bucket
    if written_out.startswith("~"):
        raise ValueError(f"{text!r}: there is no such user's home folder")
    return written_out


Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A positive whole number that may be written with a suffix: 2.0B, 256Ki.
Count = Annotated[
    int,
    Field(gt=0, le=_LARGEST),
    BeforeValidator(parse_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": COUNT_PATTERN}]}
    ),
]
# The same, or 0.
NonNegativeCount = Annotated[
    int,
    Field(ge=0, le=_LARGEST),
    BeforeValidator(parse_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": COUNT_PATTERN}]}),
]
# YAML has lists only; strict mode would refuse a list where a tuple is declared.
Ints = Annotated[tuple[int, ...], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
# A file or folder; seen from the working directory where it is relative.
PathText = Annotated[str, AfterValidator(_path)]


class Drift(StrEnum):
    """What may become of a key when a run goes on."""

    FROZEN = "frozen"
    """Never changes within a run: arrays or the order of the data depend on it."""
    BRANCH = "branch"
    """What is learned depends on it: changes only with a run folder of its own (``--branch``)."""
    FREE = "free"
    """May change; the change is written down."""
    DERIVED = "derived"
    """A fact of the surroundings, no wish: written down, refused where bits must repeat."""


T = TypeVar("T")
Frozen = Annotated[T, Drift.FROZEN]
Branch = Annotated[T, Drift.BRANCH]
Free = Annotated[T, Drift.FREE]


class Section(BaseModel):
    """One section of the experiment file: strict types, no unknown keys, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    drift: ClassVar[Drift | None] = None
    """Class of the keys that name none of their own."""

    def __init_subclass__(cls, drift: str | None = None, **kwargs: Any) -> None:
        if drift is not None:
            cls.drift = Drift(drift)
        super().__init_subclass__(**kwargs)
