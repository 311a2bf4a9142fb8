"""How the tokens of the experts travel: names, bounds, and the bytes that ``auto`` weighs. Imports no JAX.

Letters: R ranks that share the experts, S tokens a rank, k experts a token, L width in which tokens travel.
"""

import math
from typing import Literal, NamedTuple

Transport = Literal["gather", "padded", "ragged"]

SUB_SLICES = 512
"""Pieces into which ``ragged`` cuts what goes to one rank: XLA's kernel works on pieces side by side, not within one.
On two H200 one piece a rank ran at 3 GB/s, 512 at 178 (docs/model/expert-parallel.md)."""

RELATIVE_RATE: dict[Transport, float] = {"gather": 1.0, "padded": 1.0, "ragged": 0.66}
"""Measured rate of each transport against a dense all-to-all (two H200, 448 MiB a rank: 258, 269 and 178 GB/s)."""

HEADROOM = 1.25
"""Rows of a pair that ``padded`` has room for in one phase, against the mean of evenly spread choices."""


class Options(NamedTuple):
    """What a run may choose."""

    transport: Literal["auto", "gather", "padded", "ragged"] = "auto"
    """``gather``: all tokens to all ranks; ``padded``: all-to-all with room for ``capacity`` rows a pair, in as many
    phases as the fullest pair needs; ``ragged``: exactly the rows that are needed."""
    redundant_slots: int = 2
    """Foreign experts a rank has room for at a time; a plan that needs more runs in rounds."""
    capacity: int | None = None
    """Rows of a pair in one phase of ``padded``; none takes :func:`default_capacity`."""
    everywhere: bool = False
    """All experts on every rank, and no token travels: what the others are checked against."""


class Weighed(NamedTuple):
    """One line of the table behind ``auto``."""

    transport: Transport
    rows: float
    """Rows that leave a rank in one direction."""
    megabytes: float
    """Megabytes (1e6) that leave a rank in one forward pass: tokens with places and weights out, sums home."""
    cost: float
    """Megabytes divided by the transport's relative rate; the least wins, the first of equals."""


def share_of_pair(ranks: int, top_k: int) -> float:
    """Part of a rank's tokens that has at least one of ``top_k`` evenly spread choices on a given rank."""
    return 1.0 - (1.0 - 1.0 / ranks) ** top_k


def default_capacity(ranks: int, top_k: int, tokens: int) -> int:
    """Rows of a pair in one phase: the mean of even choices with :data:`HEADROOM`, in eights, at most all tokens."""
    rows = math.ceil(HEADROOM * share_of_pair(ranks, top_k) * tokens)
    return min(tokens, -(-rows // 8) * 8)


def weigh(
    ranks: int, top_k: int, tokens: int, width: int, itemsize: int, capacity: int | None = None
) -> tuple[Transport, list[Weighed]]:
    """Chooses the transport of ``auto``; a pure function of sizes, so that all ranks and all starts agree.

    Args:
      ranks: R.
      top_k: k.
      tokens: S.
      width: L.
      itemsize: bytes of one element of a token on its way.
      capacity: see :class:`Options`.

    Returns:
      (name, one line for each transport, in the order in which equals win).
    """
    capacity = default_capacity(ranks, top_k, tokens) if capacity is None else min(capacity, tokens)
    others = ranks - 1
    mean = share_of_pair(ranks, top_k) * tokens
    # A capacity below the mean costs whole further phases.
    phases = max(1, math.ceil(mean / capacity))
    rows: dict[Transport, float] = {
        "gather": float(others * tokens),
        "padded": float(others * capacity * phases),
        "ragged": others * mean,
    }
    # Each row travels out with a place and a weight (four bytes each) a choice, and one sum travels home.
    row_bytes = 2 * width * itemsize + 8 * top_k
    lines = []
    for transport, count in rows.items():
        megabytes = count * row_bytes / 1e6
        lines.append(Weighed(transport, count, megabytes, megabytes / RELATIVE_RATE[transport]))
    return min(lines, key=lambda line: line.cost).transport, lines


def resolve(options: Options, ranks: int, top_k: int, tokens: int, width: int, itemsize: int) -> Transport:
    """The transport's name with ``auto`` replaced by the choice of :func:`weigh`."""
    if options.transport != "auto":
        return options.transport
    return weigh(ranks, top_k, tokens, width, itemsize, options.capacity)[0]
