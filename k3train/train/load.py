"""A run's weights, for evaluating and generating: nothing of the optimizer is read."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from k3train.checkpoint.resolve import locate
from k3train.checkpoint.subtree import restore_subtree
from k3train.config.errors import UserError
from k3train.config.load import load
from k3train.data.store import Store
from k3train.experiment import Experiment
from k3train.parallel.config import AXES
from k3train.parallel.mesh import build_mesh
from k3train.run.directory import CONFIG, read_experiment
from k3train.run.identity import STORE_KEY, TOKENIZER_KEY
from k3train.run.mirror import local_copy
from k3train.train.assembly import Assembly, assemble, open_data


class OpenedRun(NamedTuple):
    """The parts of a run that lies in a folder."""

    parts: Assembly
    folder: Path
    """The run folder."""
    trained_on: str | None
    """Content hash of the store that the run was trained on; None where it is not known, or another was asked for."""


class LoadedRun(NamedTuple):
    """Weights of one step, float32, and the parts they belong to."""

    parts: Assembly
    params: dict
    buffers: dict
    step: int
    folder: Path
    """As in ``OpenedRun``."""
    trained_on: str | None
    """As in ``OpenedRun``."""


def load_run(run: str, overrides: Sequence[str], *, ema: bool, say: Callable[[str], None]) -> LoadedRun:
    """Reads RUN or RUN@STEP with the run's own config, onto one device unless ``overrides`` give a mesh.

    Raises:
      UserError: exit 31 where there is no such checkpoint; else like :func:`open_run`.
    """
    found = locate(run, "RUN")
    own_mesh = any(text.partition("=")[0].split(".")[0] == "mesh" for text in overrides)
    mesh = [] if own_mesh else [f"mesh.{axis}=1" for axis in AXES]
    opened = open_run(local_copy(found.directory.parent), [*mesh, *overrides], one_device=not own_mesh)
    if ema and opened.parts.exp.optim.ema is None:
        raise UserError(f"--ema: {opened.folder} keeps no averaged weights (its optim.ema is null)")
    weights = "ema" if ema else "params"
    abstract = opened.parts.factory.abstract
    wanted = {"buffers": abstract["buffers"], weights: abstract["params"]}
    tree, *_ = restore_subtree(found.directory, found.step, wanted, key=None, note=say)
    return LoadedRun(opened.parts, tree[weights], tree.get("buffers", {}), found.step, opened.folder, opened.trained_on)


def open_run(folder: Path, overrides: Sequence[str], *, one_device: bool) -> OpenedRun:
    """A run's parts by its own config and ``overrides``, on the config's mesh or on one device.

    Files and folders of the config are looked for where they were, and then in the same place as seen from the run
    folder, so that a run that was moved together with its data is found.

    Raises:
      UserError: exit 30 where the run's config cannot be read, or the tokenizer is not the one it was trained with.
    """
    given = {text.partition("=")[0] for text in overrides}
    exp = _found(load(folder / CONFIG, list(overrides), Experiment).experiment, folder, given)
    parts = assemble(exp, build_mesh(exp.mesh, jax.local_devices()[:1]) if one_device else None)
    claims = _claims(folder)
    if "data.tokenizer.path" not in given and claims.get(TOKENIZER_KEY, parts.tokenizer.fingerprint) != (
        parts.tokenizer.fingerprint
    ):
        raise UserError(
            f"{exp.data.tokenizer.path or exp.data.tokenizer.kind}: not the tokenizer that {folder} was trained with "
            "(its fingerprint differs: another file, or a library that encodes differently); bring the old one back"
        )
    return OpenedRun(parts, folder, None if "data.store" in given else claims.get(STORE_KEY))


def open_run_data(run: OpenedRun | LoadedRun, say: Callable[[str], None]) -> Store:
    """The token store of a loaded run. It is never made here: what it would be made from may have changed.

    Raises:
      UserError: it is not there, damaged, or holds something else than the run was trained on.
    """
    data = run.parts.exp.data
    if not Path(data.store).exists():
        raise UserError(
            f"{data.store}: the run's token store is not there. Name its place (data.store=PATH), or make it anew with "
            f"k3train data prepare {run.folder / CONFIG}"
        )
    exp = run.parts.exp.model_copy(update={"data": data.model_copy(update={"source": None})})
    store = open_data(exp, say)
    if run.trained_on not in (None, store.fingerprint):
        raise UserError(
            f"{data.store}: not the text that {run.folder} was trained on, so its held-out documents may have been "
            f"seen in training, and scores do not compare. Name the run's own store, or say data.store={data.store} "
            "to score on this one nevertheless"
        )
    return store


def _claims(folder: Path) -> dict[str, Any]:
    """What the run's trainer found out: hashes of its store and tokenizer."""
    stored = read_experiment(folder)
    return stored["claimed"] if stored else {}


def _found(exp: Experiment, folder: Path, given: set[str]) -> Experiment:
    """``exp`` with its store and tokenizer where they are now."""
    data, was = exp.data, exp.run.dir

    def now(path: str) -> str:
        moved = os.path.normpath(folder.absolute() / os.path.relpath(path, was))
        return path if Path(path).exists() or not Path(moved).exists() else moved

    changes: dict[str, Any] = {}
    if "data.store" not in given:
        changes["store"] = now(data.store)
    if data.tokenizer.path is not None and "data.tokenizer.path" not in given:
        changes["tokenizer"] = data.tokenizer.model_copy(update={"path": now(data.tokenizer.path)})
    return exp.model_copy(update={"data": data.model_copy(update=changes)})
