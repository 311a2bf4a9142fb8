"""The arrays of a state: their table, how two tables differ, and reading them from Orbax onto any mesh.

Orbax casts dtypes silently and reports shapes at length (toolchain.md 4), so tables are compared before it is asked.
"""

from typing import Any, NamedTuple

import jax
from etils.epath import Path
from orbax.checkpoint import v1 as ocp

from k3train.checkpoint.orbax_store import orbax_context

Tree = Any  # nested dicts of jax.Array or jax.ShapeDtypeStruct
Table = dict[str, list]


class Differences(NamedTuple):
    """How the wanted arrays differ from the stored ones; dotted names."""

    missing: list[str]
    """Wanted, not stored."""
    unexpected: list[str]
    """Stored, not wanted."""
    reshaped: list[str]
    """In both with another shape or dtype: ``name: stored float32 [2, 3], wanted float32 [3, 2]``."""

    def lines(self) -> list[str]:
        """One line a difference."""
        return [
            *(f"missing in the checkpoint: {name}" for name in self.missing),
            *(f"not in this model: {name}" for name in self.unexpected),
            *self.reshaped,
        ]


def dotted(path: tuple) -> str:
    """``params.embed.weight`` for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def array_table(tree: Tree) -> Table:
    """``{name: [dtype, shape]}`` of every leaf, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {dotted(path): [str(leaf.dtype), list(leaf.shape)] for path, leaf in leaves}


def differences(stored: Table, wanted: Table) -> Differences:
    """Compare two tables."""
    both = [name for name in wanted if name in stored]
    return Differences(
        [name for name in wanted if name not in stored],
        [name for name in stored if name not in wanted],
        [
            f"{name}: stored {stored[name][0]} {stored[name][1]}, wanted {wanted[name][0]} {wanted[name][1]}"
            for name in both
            if list(stored[name]) != list(wanted[name])
        ],
    )


def read_all(folder: Path, abstract: Tree) -> Tree:
    """Read a whole state in the shapes, dtypes and shardings of ``abstract``; tables must have been compared."""
    with orbax_context(folder):
        return ocp.load(str(folder), abstract)


def read_some(folder: Path, abstract: Tree) -> Tree:
    """Read only the leaves of ``abstract``, which must all be stored in that shape and dtype."""
    context = orbax_context(folder)
    context.pytree.loading.partial_load = True
    with context:
        return ocp.load(str(folder), abstract)


def select(tree: Tree, names: set[str], prefix: str = "") -> Tree:
    """The nested dict with only the leaves whose dotted name is in ``names``; empty branches go."""
    if not isinstance(tree, dict):
        return tree
    chosen = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            branch = select(value, names, f"{name}.")
            if branch:
                chosen[key] = branch
        elif name in names:
            chosen[key] = value
    return chosen


def refusal(folder: Path, found: list[str], what: str = "does not fit this model", most: int = 12) -> str:
    """One screen of differing arrays: ``{folder} {what} and was not loaded``."""
    more = [f"... and {len(found) - most} more"] if len(found) > most else []
    return f"{folder} {what} and was not loaded:\n  " + "\n  ".join(found[:most] + more)
