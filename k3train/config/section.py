"""The base of every config section, and the field types they share. Imports no JAX."""

from pathlib import Path
from typing import Annotated

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
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise ValueError(f"{text!r}: there is no such user's home folder") from None


Positive = Annotated[int, Field(gt=0, le=_LARGEST)]
NonNegative = Annotated[int, Field(ge=0, le=_LARGEST)]
PositiveFloat = Annotated[float, Field(gt=0)]
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
# YAML has lists only; strict mode would refuse a list where a tuple is declared.
Ints = Annotated[tuple[int, ...], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
# A file or folder; seen from the working directory where it is relative.
PathText = Annotated[str, AfterValidator(_path)]


class Section(BaseModel):
    """One section of the experiment file: strict types, no unknown keys, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
