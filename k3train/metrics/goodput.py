"""Goodput: the share of the time since a run's first start that went into steps which still count. Imports no JAX.

goodput = time in kept steps / (now - first start). The rest is split into start, restore, compile, data, eval, save,
sample, rewound (steps done again after a resume from before them) and idle (between attempts, and what an attempt that
died left unrecorded). Definition after operations.md 5.1; computed from attempts.jsonl.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Attempt(NamedTuple):
    """What one attempt did.

    Attributes:
      first, last: optimizer steps done at its start and at its end.
      began, ended: wall clock, seconds since 1970.
      seconds: seconds spent, by phase; ``step`` among them.
    """

    first: int
    last: int
    began: float
    ended: float
    seconds: Mapping[str, float]


def attempts_of(lines: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts in the lines of attempts.jsonl that are over.

    One without an end line, and not known from status.json either, counts as idle from its start.
    """
    out: list[Attempt] = []
    starts = {line["attempt"]: line for line in lines if line["event"] == "start"}
    ends = {line["attempt"]: line for line in lines if line["event"] in ("end", "lost")}
    for number, start in starts.items():
        first, began = start.get("resumed_step") or 0, start.get("began", start["time"])
        end = ends.get(number, {})
        last = max(first, end.get("step") or first)
        out.append(Attempt(first, last, began, end.get("time", began), end.get("seconds") or {}))
    return out


def goodput(attempts: Sequence[Attempt], now: float) -> dict[str, float]:
    """Seconds by use, ``wall`` (their sum, up to rounding), and ``goodput``, a share of it.

    Args:
      attempts: in order; the last one may be under way, its ``ended`` being ``now``.
      now: wall clock.
    """
    spent: dict[str, float] = {"step": 0.0, "rewound": 0.0}
    kept_to = float("inf")
    for attempt in reversed(attempts):
        done = attempt.last - attempt.first
        kept = min(max(min(attempt.last, kept_to) - attempt.first, 0), done)
        in_steps = attempt.seconds.get("step", 0.0)
        share = kept / done if done else 1.0
        spent["step"] += in_steps * share
        spent["rewound"] += in_steps * (1 - share)
        for phase, seconds in attempt.seconds.items():
            if phase != "step":
                spent[phase] = spent.get(phase, 0.0) + seconds
        kept_to = min(kept_to, attempt.first)
    wall = max(now - attempts[0].began, 1e-9) if attempts else 1e-9
    spent["idle"] = max(wall - sum(spent.values()), 0.0)
    return spent | {"wall": wall, "goodput": min(spent["step"] / wall, 1.0)}
