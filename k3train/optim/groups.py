"""Which optimizer updates which array, and the table of it that a run prints."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table

from k3train.optim.config import OptimConfig
from k3train.parallel.trees import Path, Spec, Tree, flatten, paired, patterns

Group = Literal["muon", "adamw"]
GROUPS: tuple[Group, ...] = ("muon", "adamw")


class GroupRow(NamedTuple):
    """Arrays that are updated alike."""

    group: Group
    heads: int
    """Blocks into which each matrix is cut."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    arrays: int
    """Arrays, those of a layer stack counted once a layer."""
    elements: int
    names: tuple[str, ...]
    """Names with layer numbers replaced by ``*``."""


def group_of(spec: Spec, cfg: OptimConfig) -> Group:
    """The optimizer of an array."""
    return "muon" if spec.group == "muon" and cfg.matrices == "muon" else "adamw"


def weight_decay_of(spec: Spec, cfg: OptimConfig) -> float:
    """Decoupled weight decay of an array: its optimizer's where the spec decays, else 0."""
    return getattr(cfg, group_of(spec, cfg)).weight_decay if spec.decay else 0.0


def heads_of(spec: Spec, cfg: OptimConfig) -> int:
    """Blocks of the last axis that Muon orthogonalises by themselves."""
    return spec.heads if cfg.muon.per_head and group_of(spec, cfg) == "muon" else 1


def split_groups(specs: Tree, cfg: OptimConfig) -> dict[Group, dict[Path, Spec]]:
    """Specs by path for each optimizer."""
    groups: dict[Group, dict[Path, Spec]] = {group: {} for group in GROUPS}
    for path, spec in flatten(specs).items():
        groups[group_of(spec, cfg)][path] = spec
    return groups


def group_table(params: Tree, specs: Tree, cfg: OptimConfig) -> list[GroupRow]:
    """One row for each way of updating; every array is in exactly one.

    Args:
      params: nested dict of arrays or ``jax.ShapeDtypeStruct``.
      specs: the same nested dict of ``ParamSpec``.
      cfg: the optim section.
    """
    alike: dict[tuple[Group, int, float], dict[Path, tuple[Any, Spec]]] = {}
    for path, (array, spec) in paired(params, specs).items():
        key = (group_of(spec, cfg), heads_of(spec, cfg), weight_decay_of(spec, cfg))
        alike.setdefault(key, {})[path] = (array, spec)
    return [_row(key, members, cfg) for key, members in sorted(alike.items(), key=lambda kv: _order(kv[0]))]


def render(rows: list[GroupRow]) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title="Parameter groups")
    for title in ("group", "blocks", "lr", "decay", "arrays", "elements", "names"):
        table.add_column(title, justify="left" if title in ("group", "names") else "right", overflow="fold")
    for row in rows:
        names = dict.fromkeys(name.split("*.")[-1] for name in row.names)  # the same part in several segments
        table.add_row(row.group, str(row.heads), f"{row.lr:g}", f"{row.weight_decay:g}", f"{row.arrays:,}",
                      f"{row.elements:,}", ", ".join(names))  # fmt: skip
    return table


def _row(key: tuple[Group, int, float], members: Mapping[Path, tuple[Any, Spec]], cfg: OptimConfig) -> GroupRow:
    group, heads, decay = key
    stacked = [array.shape[0] if array.ndim > len(spec.axes) else 1 for array, spec in members.values()]
    elements = sum(int(np.prod(array.shape)) for array, _ in members.values())
    return GroupRow(group, heads, getattr(cfg, group).lr, decay, sum(stacked), elements, patterns(members))


def _order(key: tuple[Group, int, float]) -> tuple[int, int, float]:
    group, heads, decay = key
    return GROUPS.index(group), -heads, -decay
