"""Looking at checkpoints: what lies in a run, and how two of them differ. The values part imports JAX, nothing else."""

import math
import time
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

from etils.epath import Path

from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.files import files_below, place
from k3train.checkpoint.layout import FOLDER, Entry, complete, scan
from k3train.config.drift import flatten
from k3train.config.exit_codes import ExitCode
from k3train.config.storage import storage


def directory_of(run: str | PathLike[str]) -> Path:
    """The ``checkpoints`` folder of a run folder, or the folder itself where it has none.

    Raises:
      CheckpointRefused: there is no such folder.
    """
    path = place(run)
    with storage(path, "look for checkpoints", ExitCode.CHECKPOINT):
        if not path.is_dir():
            raise CheckpointRefused(f"{path} is not a folder")
        return path / FOLDER if (path / FOLDER).is_dir() else path


class Row(NamedTuple):
    """One line of ``k3train ckpt list``."""

    folder: str
    step: int
    kind: str
    """permanent, temporary or final; empty where the manifest cannot be read."""
    status: str
    """As ``layout.Entry.status``, or ``kept``: complete, and named by the user."""
    reason: str
    size: int
    """Bytes of all files."""
    saved: float | None
    """Seconds since 1970."""
    eval: float | None
    """eval/holdout/loss at this step."""
    tokens: int | None
    """Nominal tokens of the run until then."""
    state_hash: str
    """Hash of all arrays, the same on any mesh."""


def rows(directory: Path) -> list[Row]:
    """Every folder named like a step, by step."""
    return [_row(entry) for entry in scan(directory)]


def _row(entry: Entry) -> Row:
    manifest = entry.manifest
    return Row(
        entry.path.name,
        entry.step,
        manifest.get("kind", ""),
        "kept" if entry.kept and entry.status == "complete" else entry.status,
        entry.reason,
        sum(files_below(entry.path).values()),
        manifest.get("time"),
        manifest.get("eval"),
        manifest.get("meta", {}).get("tokens"),
        manifest.get("state_hash", {}).get("all", ""),
    )


def age(saved: float | None, now: float | None = None) -> str:
    """``3 h 20 min`` since a time; empty for None."""
    if saved is None:
        return ""
    seconds = int(max((time.time() if now is None else now) - saved, 0))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"


def find(text: str) -> Entry:
    """The checkpoint that ``RUN@STEP`` (or ``RUN``, its newest) names.

    Raises:
      CheckpointRefused: there is none; lists the steps.
    """
    place, at, step = text.rpartition("@")
    directory = directory_of(place if at else text)
    entries = complete(scan(directory))
    if not entries:
        raise CheckpointRefused(f"{directory} holds no complete checkpoint")
    wanted = max(entries) if not at or step == "latest" else int(step) if step.isdecimal() else None
    if wanted not in entries:
        raise CheckpointRefused(f"{directory}: no checkpoint of step {step}; there: {', '.join(map(str, entries))}")
    return entries[wanted]


class Difference(NamedTuple):
    """How checkpoint B differs from A."""

    config: dict[str, list]
    """``{key: [in A, in B]}``; an absent key reads ``(absent)``."""
    only_a: list[str]
    """Arrays."""
    only_b: list[str]
    reshaped: dict[str, list]
    """``{array: [[dtype, shape] in A, in B]}``."""
    changed: list[str]
    """Arrays of one shape and dtype whose hashes differ."""
    equal: list[str]
    """Arrays with the same hash."""


def compare(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """Compare two manifests; reads no arrays."""
    flat_a, flat_b = (flatten(manifest["meta"].get("config", {})) for manifest in (a, b))
    absent = "(absent)"
    pairs = {key: [flat_a.get(key, absent), flat_b.get(key, absent)] for key in [*flat_a, *flat_b]}
    in_a, in_b = a["arrays"], b["arrays"]
    both = [name for name in in_a if name in in_b]
    alike = [name for name in both if in_a[name] == in_b[name]]
    hash_a, hash_b = (manifest["state_hash"]["arrays"] for manifest in (a, b))
    return Difference(
        {key: pair for key, pair in pairs.items() if pair[0] != pair[1]},
        [name for name in in_a if name not in in_b],
        [name for name in in_b if name not in in_a],
        {name: [in_a[name], in_b[name]] for name in both if in_a[name] != in_b[name]},
        [name for name in alike if hash_a[name] != hash_b[name]],
        [name for name in alike if hash_a[name] == hash_b[name]],
    )


class Distance(NamedTuple):
    """How far an array of B is from that of A, in float64."""

    name: str
    max_abs: float
    """Largest absolute difference."""
    relative: float
    """Norm of the difference over the norm of A's array; infinite where that is zero."""


def distances(a: Entry, b: Entry, names: list[str]) -> Iterator[Distance]:
    """Read arrays of two checkpoints, a few at a time, onto one device, and compare their values."""
    import jax
    import numpy as np

    from k3train.checkpoint.arrays import dotted, read_some

    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def read(entry: Entry, some: list[str]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for name in some:
            dtype, shape = entry.manifest["arrays"][name]
            *parents, last = name.split(".")
            branch = tree
            for key in parents:
                branch = branch.setdefault(key, {})
            branch[last] = jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype), sharding=device)
        return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(read_some(entry.path, tree))}

    for some in _portions(a, names):
        first_of, second_of = read(a, some), read(b, some)
        for name in some:
            first, second = (np.asarray(arrays.pop(name)).astype(np.float64) for arrays in (first_of, second_of))
            size = float(np.linalg.norm(first.ravel()))
            gap = float(np.linalg.norm((second - first).ravel()))
            largest = float(np.max(np.abs(second - first), initial=0.0))
            yield Distance(name, largest, gap / size if size else float("inf") if gap else 0.0)


def _portions(entry: Entry, names: list[str], most: int = 1 << 26) -> Iterator[list[str]]:
    """``names``, in order, in lists of at most ``most`` elements together; to open a checkpoint takes longer than to
    read a small array."""
    some, held = [], 0
    for name in names:
        elements = math.prod(entry.manifest["arrays"][name][1])
        if some and held + elements > most:
            yield some
            some, held = [], 0
        some.append(name)
        held += elements
    if some:
        yield some
