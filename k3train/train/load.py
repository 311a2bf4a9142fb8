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
from k3train.data.stores import Stores
from k3train.experiment import Experiment
from k3train.parallel.config import AXES
from k3train.parallel.mesh import build_mesh
from k3train.run.directory import CONFIG, read_experiment
from k3train.run.identity import TOKENIZER_KEY, store_key
from k3train.run.mirror import local_copy
from k3train.train.assembly import Assembly, assemble, open_data


class OpenedRun(NamedTuple):
    """The parts of a run that lies in a folder."""

    parts: Assembly
    folder: Path
    """The run folder."""
    trained_on: dict[str, str]
    """Content hash, by source, of the stores the run was trained on, less those not known and those for which another
    was asked for."""


class LoadedRun(NamedTuple):
    """Weights of one step, float32, and the parts they belong to."""

    parts: Assembly
    params: dict
    buffers: dict
    step: int
    folder: Path
    """As in ``OpenedRun``."""
    trained_on: dict[str, str]
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
    known = {name: claims.get(store_key(name)) for name in exp.data.singles() if not _is_given(name, given)}
    return OpenedRun(parts, folder, {name: content for name, content in known.items() if content is not None})


def open_run_data(run: OpenedRun | LoadedRun, say: Callable[[str], None]) -> Stores:
    """The token stores of a loaded run. They are never made here: what they would be made from may have changed.

    Raises:
      UserError: one is not there, damaged, or holds something else than the run was trained on.
    """
    data = run.parts.exp.data
    singles = data.singles()
    for name, single in singles.items():
        if not Path(single.place).exists():
            raise UserError(
                f"{single.place}: the run's token store is not there. Name its place ({_store_of(name)}=PATH), or make "
                f"it anew with k3train data prepare {run.folder / CONFIG}"
            )
    stores = open_data(run.parts.exp.model_copy(update={"data": data.without_sources()}), say)
    for name, content in stores.fingerprints.items():
        if run.trained_on.get(name, content) != content:
            place = singles[name].place
            raise UserError(
                f"{place}: not the text that {run.folder} was trained on, so its held-out documents may have been "
                f"seen in training, and scores do not compare. Name the run's own store, or say "
                f"{_store_of(name)}={place} to score on this one nevertheless"
            )
    return stores


def _store_of(source: str) -> str:
    """The key of a source's store."""
    return f"data.sources.{source}.store" if source else "data.store"


def _is_given(source: str, given: set[str]) -> bool:
    """Whether an override names the store of a source."""
    key = _store_of(source)
    return any(key == name or key.startswith(f"{name}.") for name in given - {"data"})


def _claims(folder: Path) -> dict[str, Any]:
    """What the run's trainer found out: hashes of its store and tokenizer."""
    stored = read_experiment(folder)
    return stored["claimed"] if stored else {}


def _found(exp: Experiment, folder: Path, given: set[str]) -> Experiment:
    """``exp`` with its stores and tokenizer where they are now."""
    data, was = exp.data, exp.run.dir

    def now(path: str) -> str:
        moved = os.path.normpath(folder.absolute() / os.path.relpath(path, was))
        return path if Path(path).exists() or not Path(moved).exists() else moved

    named = {single.place for name, single in data.singles().items() if _is_given(name, given)}
    data = data.with_stores(lambda place: place if place in named else now(place))
    if data.tokenizer.path is not None and "data.tokenizer.path" not in given:
        tokenizer = data.tokenizer.model_copy(update={"path": now(data.tokenizer.path)})
        data = data.model_copy(update={"tokenizer": tokenizer})
    return exp.model_copy(update={"data": data})
