"""``anomalies.jsonl``: every bad step with its values and the documents it read, and a line for the user."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3train.data.loader import Loader
from k3train.metrics.writers.jsonl import JsonlWriter
from k3train.optim.config import GuardConfig

FILE = "anomalies.jsonl"
_UPDATE = "train/update_norm/"
_KEPT = ("train/", "guard/", "data/")


class AnomalyLog:
    """Writes bad steps down; process 0 only.

    A line holds step, samples, tokens, time, attempt; ``kind`` (nonfinite or spike), ``action`` (skipped or applied),
    ``first_sample``; the step's train/, guard/ and data/ metrics; and ``rows``: sample, epoch, row, source and the
    documents' numbers in its store, for every row of the global batch.

    Args:
      folder: the run's.
      attempt, keep_to: as for ``JsonlWriter``: bad steps after ``keep_to`` will be done, and judged, anew.
      loader: the run's; knows the documents of a sample.
    """

    def __init__(self, folder: Path, attempt: int, keep_to: int, loader: Loader):
        self._writer = JsonlWriter(folder / FILE, attempt, keep_to)
        self._loader = loader

    def write(self, step: int, samples: int, tokens: int, values: Mapping[str, Any]) -> None:
        """Takes a bad step's metrics; ``samples`` counts to its end."""
        rows = self._loader.trace.rows(*self._loader.course.rows_at(step - 1))
        line: dict[str, Any] = {
            "kind": "nonfinite" if values["train/nonfinite"] else "spike",
            "action": "skipped" if values["train/skipped"] else "applied",
            "first_sample": rows[0].sample,
        }
        line |= {name: value for name, value in values.items() if name.startswith(_KEPT)}
        line["rows"] = [row._asdict() for row in rows]
        self._writer.write(step, samples, tokens, line)

    def close(self) -> None:
        """Closes the file; may be called twice."""
        self._writer.close()


def describe(step: int, values: Mapping[str, Any], cfg: GuardConfig) -> str:
    """What happened at a bad step and what was done, in one line."""
    if values["train/nonfinite"]:
        what = f"not finite (loss {values['train/loss']:.4g}, gradient norm {values['train/grad_norm']:.4g})"
    elif lost := [n.rpartition("/")[2] for n, v in values.items() if n.startswith(_UPDATE) and not math.isfinite(v)]:
        # Judging it beforehand would cost the memory of all updates (optim/guard.py).
        what = f"the update of {', '.join(lost)} is not finite"
        if not values["train/skipped"]:
            what += f", so that the weights are lost; go back to a checkpoint before step {step}, with lower rates"
    else:
        groups = {name.rpartition("/")[2]: v for name, v in values.items() if name.startswith("guard/update_deviation")}
        updates = ", ".join(f"{group} update {value:.1f}" for group, value in groups.items())
        what = (
            f"spike: loss {values['train/loss']:.4f}, {values['guard/loss_deviation']:.1f} standard deviations above "
            f"its mean ({updates}; limits {cfg.loss_sigma} and {cfg.update_sigma})"
        )
    done = "skipped" if values["train/skipped"] else "applied all the same"
    return f"WARNING: step {step}: {what}; {done}. Its documents are named in {FILE}"


def halt_reason(step: int, values: Mapping[str, Any], cfg: GuardConfig) -> str:
    """Why the guard ends the run."""
    key = "nonfinite" if values["train/nonfinite"] else "spikes"
    if getattr(cfg, key) == "halt":
        return f"step {step} was bad and optim.guard.{key} is halt"
    return (
        f"{values['guard/skipped_in_a_row']:.0f} steps in a row, {values['guard/skipped_in_window']:.0f} of the last "
        f"{cfg.window}, were skipped up to step {step} (optim.guard.max_in_a_row {cfg.max_in_a_row}, max_in_window "
        f"{cfg.max_in_window})"
    )
