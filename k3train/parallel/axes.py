"""Logical axes of arrays to mesh axes: the one rule table, and a report of what it did."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from k3train.parallel.trees import Path, Spec, Tree, paired, pattern, rebuild

RULES: dict[str, str | None] = {
    "embed": "fsdp",
    "experts": "fsdp",
    "vocab": "fsdp",
    "heads": "fsdp",
    "mlp": "fsdp",
    "latent": "fsdp",
    "expert_mlp": "fsdp",
    "q_lora": "fsdp",
    "kv_lora": "fsdp",
    "gate_rank": "fsdp",
    "taps": None,
}
"""Every logical axis and the mesh axis that may split it. An array gives a mesh axis to the first of these,
in the order of this table, that it has and whose size divides."""

BATCH = PartitionSpec(("data", "fsdp"))
"""Rows of a batch: every device takes a share."""

LARGE = 2**20
"""Bytes from which a replicated array is worth a word."""


def partition(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """How an array lies on the mesh.

    A mesh axis is used once an array; a size that does not divide leaves it to the next logical axis.
    Vectors stay whole: gathering one costs more than holding it. Leading axes that ``axes`` does not name
    (a layer stack) are not split.

    Raises:
      ValueError: a logical axis that is not in :data:`RULES`.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in RULES]
    if unknown:
        raise ValueError(f"logical axis {unknown[0]!r} is not in parallel/axes.py RULES")
    lead = len(shape) - len(axes)
    entries: list[str | None] = [None] * len(shape)
    used: set[str] = set()
    for logical, mesh_axis in RULES.items() if len(axes) > 1 else ():
        if mesh_axis is None or mesh_axis in used or mesh.shape[mesh_axis] == 1 or logical not in axes:
            continue
        place = lead + axes.index(logical)
        if shape[place] % mesh.shape[mesh_axis] == 0:
            entries[place] = mesh_axis
            used.add(mesh_axis)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def param_shardings(mesh: Mesh, abstract_params: Tree, specs: Tree) -> dict[Any, Any]:
    """A ``NamedSharding`` for each array, in the form of ``abstract_params``.

    Args:
      mesh: from ``build_mesh``.
      abstract_params: nested dict of arrays or ``jax.ShapeDtypeStruct``.
      specs: the same nested dict of ``ParamSpec``.
    """
    flat = {
        path: NamedSharding(mesh, partition(mesh, array.shape, spec.axes))
        for path, (array, spec) in paired(abstract_params, specs).items()
    }
    return rebuild(abstract_params, flat)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over all devices."""
    return NamedSharding(mesh, BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


class ShardRow(NamedTuple):
    """Equal arrays and how they lie."""

    name: str
    """Name with numbers replaced by ``*``."""
    arrays: int
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    spec: PartitionSpec
    bytes_a_device: int
    """Of all these arrays together."""
    note: str
    """``replicated`` for an array of at least :data:`LARGE` bytes that no mesh axis divides, else empty."""


def sharding_report(mesh: Mesh, abstract_params: Tree, specs: Tree) -> list[ShardRow]:
    """One row for each pattern and shape, largest first."""
    alike: dict[tuple[str, tuple[int, ...]], list[tuple[Path, Any, Spec]]] = {}
    for path, (array, spec) in paired(abstract_params, specs).items():
        alike.setdefault((pattern(path), tuple(array.shape)), []).append((path, array, spec))
    rows = [_row(mesh, name, shape, members) for (name, shape), members in alike.items()]
    return sorted(rows, key=lambda row: -row.bytes_a_device)


def render(rows: list[ShardRow]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title="Parameters on the mesh")
    for title in ("array", "count", "shape", "axes", "split", "MiB a device", "note"):
        table.add_column(title, justify="right" if title in ("count", "MiB a device") else "left")
    for row in rows:
        axes = ", ".join(str(axis) for axis in row.axes)
        split = ", ".join(str(entry) for entry in row.spec)
        shape = "x".join(str(size) for size in row.shape)
        table.add_row(row.name, str(row.arrays), shape, axes, split, f"{row.bytes_a_device / 2**20:.1f}", row.note)
    return table


def _row(mesh: Mesh, name: str, shape: tuple[int, ...], members: list[tuple[Path, Any, Spec]]) -> ShardRow:
    _, array, spec = members[0]
    split = partition(mesh, shape, spec.axes)
    whole = math.prod(shape) * jax.numpy.dtype(array.dtype).itemsize
    parts = math.prod(mesh.shape[axis] for axis in split if axis is not None)
    note = "replicated" if mesh.shape["fsdp"] > 1 and parts == 1 and whole >= LARGE else ""
    return ShardRow(name, len(members), shape, spec.axes, split, whole // parts * len(members), note)
