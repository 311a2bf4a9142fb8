"""When to save, and which checkpoints are no longer wanted. Pure; imports no JAX."""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.layout import Entry

Kind = Literal["permanent", "temporary", "final"]


class Kept(NamedTuple):
    """What the policy needs to know of a checkpoint."""

    step: int
    kind: Kind = "permanent"
    score: float | None = None
    """eval/holdout/loss at this step; None where it was not evaluated."""
    pinned: bool = False
    """The user named it."""


def due(config: CheckpointConfig, step: int, since_last_s: float) -> Kind | None:
    """What kind of save the policy wants after ``step``; None for none. ``since_last_s``: seconds since the last."""
    if step <= 0:
        return None
    if (config.every and step % config.every == 0) or step in config.keep_steps:
        return "permanent"
    if config.every_minutes is not None and since_last_s >= 60 * config.every_minutes:
        return "temporary"
    return None


def kept(entries: Iterable[Entry]) -> list[Kept]:
    """The policy's view of complete checkpoints."""
    return [
        Kept(entry.step, entry.manifest["kind"], entry.manifest["eval"], entry.kept)
        for entry in entries
        if entry.status == "complete"
    ]


def surplus(checkpoints: Sequence[Kept], config: CheckpointConfig) -> list[int]:
    """Steps to delete, ascending; the newest checkpoint is never among them.

    What stays: the newest; the ``keep`` newest that are not temporary; multiples of ``keep_every``; the ``keep_best``
    of the lowest score; those named by ``keep_steps`` or by the user. A temporary one stays until there is a newer.
    """
    if not checkpoints:
        return []
    steady = sorted(c.step for c in checkpoints if c.kind != "temporary")
    scored = sorted((c.score, -c.step) for c in checkpoints if c.score is not None and math.isfinite(c.score))
    stay = {max(c.step for c in checkpoints), *steady[-config.keep :], *config.keep_steps}
    stay |= {-step for _, step in scored[: config.keep_best]}
    stay |= {c.step for c in checkpoints if c.pinned or (config.keep_every and c.step % config.keep_every == 0)}
    return sorted({c.step for c in checkpoints} - stay)
