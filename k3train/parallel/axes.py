"""Logical axes of arrays to mesh axes: the one rule table, and a report of what it did."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.parallel.activations import ALL_AXES, axis_size, names
from k3train.parallel.config import ROW_AXES
from k3train.parallel.trees import Path, Spec, Tree, paired, pattern, rebuild

LOGICAL = (
    "embed", "experts", "vocab", "heads", "mlp", "latent", "expert_mlp", "q_lora", "kv_lora", "gate_rank", "taps",
)  # fmt: skip
"""Every name that a dimension of a parameter may have."""

MODEL_AXES = {"experts": "expert", "heads": "tensor", "mlp": "tensor"}
"""Dimensions that stay split while a layer computes, and the mesh axis that splits them."""

SHARD_AXES = ("fsdp", "expert", "context", "tensor")
"""Mesh axes that split what is stored (ZeRO-3), as far as the array's model axes leave them free: ``replica`` alone
holds copies."""

SHARDED = ("embed", "experts", "vocab", "heads", "mlp", "latent", "expert_mlp", "q_lora", "kv_lora", "gate_rank")
"""Dimensions that they split: the first of these whose size divides, for each mesh axis."""

BATCH = PartitionSpec(ROW_AXES, "context")
"""[B, T] of a batch: rows, and tokens of a row; what ``tensor`` shares out between projections is whole here."""

LARGE = 2**20
"""Bytes from which a replicated array is worth a word."""


def partition(mesh: Mesh | AbstractMesh, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """How an array is stored on the mesh.

    A mesh axis is used once an array; a size that does not divide leaves it to the next dimension. Vectors stay whole:
    gathering one costs more than holding it. Leading axes that ``axes`` does not name (a layer stack) are not split.

    Raises:
      ValueError: a logical axis that is not in :data:`LOGICAL`.
    """
    unknown = [axis for axis in axes if axis is not None and axis not in LOGICAL]
    if unknown:
        raise ValueError(f"logical axis {unknown[0]!r} is not in parallel/axes.py LOGICAL")
    if len(axes) < 2:
        return PartitionSpec()
    lead = len(shape) - len(axes)
    entries: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    used: set[str] = set()

    def give(place: int, mesh_axis: str) -> None:
        ways = mesh.shape[mesh_axis]
        if mesh_axis not in used and ways > 1 and left[place] % ways == 0:
            entries[place] += (mesh_axis,)
            left[place] //= ways
            used.add(mesh_axis)

    for logical, mesh_axis in MODEL_AXES.items():
        if logical in axes:
            give(lead + axes.index(logical), mesh_axis)
    for mesh_axis in SHARD_AXES:
        for logical in SHARDED:
            if logical in axes:
                give(lead + axes.index(logical), mesh_axis)
    out = [entry[0] if len(entry) == 1 else entry or None for entry in entries]
    while out and out[-1] is None:
        out.pop()
    return PartitionSpec(*out)


def stored(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
    """:func:`partition` on the current mesh; whole without one."""
    if axis_size(*ALL_AXES) == 1:
        return PartitionSpec()
    return partition(jax.sharding.get_abstract_mesh(), shape, axes)


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
    """[B, T] of a batch over the devices."""
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


def refuse_replicated(rows: list[ShardRow], limit_mib: float) -> None:
    """Fails where an array that no mesh axis divides is larger than ``limit_mib`` MiB.

    Raises:
      UserError: exit 32; names the arrays and the cure.
    """
    large = [row for row in rows if row.note and row.bytes_a_device / row.arrays > limit_mib * 2**20]
    if large:
        named = ", ".join(
            f"{row.name} [{'x'.join(map(str, row.shape))}], {row.bytes_a_device / row.arrays / 2**20:.0f} MiB"
            for row in large
        )
        raise UserError(
            f"every device would hold the whole of {named}: no mesh axis divides a dimension of it. Choose sizes of "
            f"mesh.fsdp, expert, context and tensor that divide one, or raise mesh.replicated_limit_mib ({limit_mib})",
            ExitCode.PLAN,
        )


def render(rows: list[ShardRow]) -> Table:
    """The rows as a table for the terminal: a line for all arrays that are cut alike, the largest sum first."""
    alike: dict[str, list[ShardRow]] = {}
    for row in rows:
        parts = zip(row.axes, tuple(row.spec)[len(row.shape) - len(row.axes) :], strict=False)
        cut = ", ".join(f"{axis} by {'+'.join(names(entry))}" for axis, entry in parts if names(entry))
        alike.setdefault(row.note or cut or "whole", []).append(row)
    table = Table(title="Parameters on the mesh")
    for title in ("cut", "arrays", "MiB a device", "names"):
        table.add_column(title, justify="right" if title in ("arrays", "MiB a device") else "left", overflow="fold")
    for cut, members in sorted(alike.items(), key=lambda kv: -sum(row.bytes_a_device for row in kv[1])):
        size = sum(row.bytes_a_device for row in members) / 2**20
        named = dict.fromkeys(row.name.split("*.")[-1] for row in members)  # the same part in several segments
        table.add_row(cut, f"{sum(row.arrays for row in members):,}", f"{size:,.2f}", ", ".join(named))
    return table


def _row(mesh: Mesh, name: str, shape: tuple[int, ...], members: list[tuple[Path, Any, Spec]]) -> ShardRow:
    _, array, spec = members[0]
    split = partition(mesh, shape, spec.axes)
    whole = math.prod(shape) * jax.numpy.dtype(array.dtype).itemsize
    parts = math.prod(mesh.shape[axis] for entry in split for axis in names(entry))
    sharded = any(mesh.shape[axis] > 1 for axis in SHARD_AXES)
    note = "replicated" if sharded and parts == 1 and whole >= LARGE else ""
    return ShardRow(name, len(members), shape, spec.axes, split, whole // parts * len(members), note)
