"""A run's weights, for evaluating and generating: nothing of the optimizer is read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from k3train.checkpoint.manager import restore_subtree
from k3train.checkpoint.resolve import locate
from k3train.config.load import load
from k3train.experiment import Experiment
from k3train.train.assembly import Assembly, assemble


class LoadedRun(NamedTuple):
    """Weights of one step, float32, and the parts they belong to."""

    parts: Assembly
    params: dict
    buffers: dict
    step: int


def load_run(run: str, overrides: Sequence[str], *, ema: bool, say: Callable[[str], None]) -> LoadedRun:
    """Reads RUN or RUN@STEP with the run's own config; the mesh is what this machine has.

    Raises:
      UserError: exit 31 where there is no such checkpoint; exit 30 where the run's config cannot be read.
    """
    found = locate(run, "RUN")
    folder: Path = found.directory.parent
    exp = load(folder / "config.yaml", ["mesh.data=1", "mesh.fsdp=1", *overrides], Experiment).experiment
    parts = assemble(exp)
    weights = "ema" if ema else "params"
    wanted = {"buffers": parts.factory.abstract["buffers"], weights: parts.factory.abstract["params"]}
    tree, *_ = restore_subtree(found.directory, found.step, wanted, key=None, note=say)
    return LoadedRun(parts, tree[weights], tree.get("buffers", {}), found.step)
