"""Counts written with a suffix: 2.0B, 256Ki, 100M. Imports no JAX."""

import re
from decimal import Decimal

_FACTORS = {"": 1}
_FACTORS |= {letter: 1000**power for power, letter in enumerate("KMBT", start=1)} | {"k": 1000, "G": 1000**3}
_FACTORS |= {letter + "i": 1024**power for power, letter in enumerate("KMGT", start=1)}

COUNT_PATTERN = r"^[0-9]+(\.[0-9]+)?([kKMBGT]|[KMGT]i)?$"


def parse_count(value: object) -> object:
    """A whole number from an int, a float that is whole (1e9), or text with a suffix; other values pass untouched.

    K, M, B (or G), T are powers of 1000; Ki, Mi, Gi, Ti powers of 1024.

    Raises:
      ValueError: where a number or a well-formed text is not whole, or text is no count.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, float):
        raise ValueError(f"{value} is not a whole number")
    if not isinstance(value, str):
        return value
    if not re.match(COUNT_PATTERN, value):
        raise ValueError(
            f"{value!r} is no count: write digits, or digits with K, M, B, T (x1000) or Ki, Mi, Gi, Ti (x1024)"
        )
    digits = value.rstrip("kKMBGTi")
    exact = Decimal(digits) * _FACTORS[value[len(digits) :]]
    if exact != exact.to_integral_value():
        raise ValueError(f"{value!r} is {exact.normalize():f}, not a whole number")
    return int(exact)
