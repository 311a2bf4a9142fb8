"""The base of every config section, and the field types they share. Imports no JAX."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from k3train.config.units import COUNT_PATTERN, parse_count

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A positive whole number that may be written with a suffix: 2.0B, 256Ki.
Count = Annotated[
    int,
    Field(gt=0),
    BeforeValidator(parse_count),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"type": "string", "pattern": COUNT_PATTERN}]}
    ),
]
# YAML has lists only; strict mode would refuse a list where a tuple is declared.
Ints = Annotated[tuple[int, ...], Field(strict=False)]
Strings = Annotated[tuple[str, ...], Field(strict=False)]


class Section(BaseModel):
    """One section of the experiment file: strict types, no unknown keys, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
