"""The loss curve as a picture: training loss and held-out metrics against tokens. Needs the extra ``plot``."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.metrics.summary import Ema
from k3train.metrics.writers.jsonl import read_jsonl

Curve = tuple[list[float], list[float]]


def loss_picture(runs: Mapping[str, Path] | Sequence[Path], out: Path, smoothing: float = 0.9) -> None:
    """Draw one or more runs' ``metrics.jsonl`` into a PNG.

    Left, the training loss (faint) and its moving average; right, every ``eval/<set>/bpb``, or the losses where there
    is no bpb.

    Args:
      runs: metrics files, by label or alone (then labelled by their folder).
      out: the picture to write.
      smoothing: decay of the moving average, a step.

    Raises:
      UserError: matplotlib is not installed, a file is absent, or there is no training loss in it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install 'k3train[plot]'", ExitCode.SETUP) from error
    named = runs if isinstance(runs, Mapping) else {Path(run).absolute().parent.name: run for run in runs}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    evals_named = set()
    for number, (label, path) in enumerate(named.items()):
        if not Path(path).is_file():
            raise UserError(f"{path}: no such metrics file", ExitCode.USAGE)
        lines, color = read_jsonl(path), f"C{number}"
        tokens, losses = curve(lines, "train/loss")
        if not tokens:
            raise UserError(f"{path}: no line has a train/loss", ExitCode.USAGE)
        ema = Ema(smoothing)
        left.plot(tokens, losses, color=color, alpha=0.25, linewidth=0.8)
        left.plot(tokens, [ema.update(loss) for loss in losses], color=color, linewidth=1.6, label=label)
        for style, name in zip(("o-", "s--", "^:", "d-."), eval_names(lines), strict=False):
            right.plot(*curve(lines, name), style, color=color, markersize=3, label=f"{label} {name}")
            evals_named.add(name.rsplit("/", 1)[1])
    left.set(title="training loss", xlabel="tokens", ylabel="nats per token")
    unit = {"bpb": "bits per byte", "loss": "nats per token"}
    right.set(title="held out", xlabel="tokens", ylabel=", ".join(unit[name] for name in sorted(evals_named)))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 4))
        if axes.has_data():
            axes.legend(fontsize="small")
    figure.savefig(out, dpi=120)


def curve(lines: list[dict[str, Any]], name: str) -> Curve:
    """(tokens, values) of a metric where it is finite, in step order."""
    points = [(line["tokens"], line[name]) for line in lines if _finite(line.get(name))]
    points.sort(key=lambda point: point[0])
    return [float(tokens) for tokens, _ in points], [float(value) for _, value in points]


def eval_names(lines: list[dict[str, Any]]) -> list[str]:
    """The ``eval/<set>/bpb`` names in the lines; ``eval/<set>/loss`` where there is none."""
    names = dict.fromkeys(name for line in lines for name in line if name.startswith("eval/"))
    for ending in ("/bpb", "/loss"):
        found = [name for name in names if name.endswith(ending)]
        if found:
            return found
    return []


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
