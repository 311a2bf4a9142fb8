"""One branch of a saved state, such as the weights without the optimizer's."""

from os import PathLike
from typing import NamedTuple

from k3train.checkpoint.arrays import Tree, array_table, differences, read_some, refusal, select
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused
from k3train.checkpoint.manager import CheckpointManager, refuse_other_values
from k3train.checkpoint.manifest import Note, ignore
from k3train.parallel.coordination import Peers


class Subtree(NamedTuple):
    """What was read, and what was not; names are dotted, without ``key``."""

    tree: Tree
    """The arrays that fit."""
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]


def restore_subtree(
    directory: str | PathLike[str],
    step: int,
    abstract: Tree,
    partial: bool = False,
    *,
    key: str | None = "params",
    peers: Peers | None = None,
    note: Note = ignore,
) -> Subtree:
    """Reads a branch of a state.

    Args:
      directory: the ``checkpoints`` folder of the run that saved it.
      step: which checkpoint.
      abstract: the branch as nested dicts of jax.ShapeDtypeStruct with shardings.
      partial: let arrays be missing, unexpected or reshaped; they are returned by name.
      key: the branch's key in the state; None where ``abstract`` holds several whole branches by their keys, such as
        params and buffers (then other branches are no difference).
      peers: the processes that restore together.
      note: hears about long verification.

    Raises:
      CheckpointRefused: no such step, damaged files, or (without ``partial``) arrays that do not fit.
    """
    folder, manifest = CheckpointManager(directory, CheckpointConfig(), peers=peers, note=note).checked(step)
    prefixes = (f"{key}.",) if key else tuple(f"{name}." for name in abstract)
    branch = {
        name: entry
        for name, entry in manifest["arrays"].items()
        if name.startswith(prefixes) or (not key and name in abstract)
    }
    if not branch:
        raise CheckpointRefused(f"{folder} holds no arrays under {' or '.join(p[:-1] for p in prefixes)}")
    if key:
        branch = {name.removeprefix(f"{key}."): entry for name, entry in branch.items()}
    wanted = array_table(abstract)
    found = differences(branch, wanted)
    if found.lines() and not partial:
        cure = "run.init_partial: true begins with the arrays that fit and names the others"
        raise CheckpointRefused(f"{refusal(folder, found.lines())}\n{cure}")
    fitting = {name for name in wanted if branch.get(name) == wanted[name]}
    if not fitting:
        return Subtree({}, *found)
    chosen = select(abstract, fitting)
    tree = read_some(folder, {key: chosen} if key else chosen)
    refuse_other_values(folder, manifest, tree)
    return Subtree(tree[key] if key else tree, *found)
