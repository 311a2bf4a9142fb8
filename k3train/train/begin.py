"""How a run begins: anew, from another run's weights, or where it left off."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.resolve import locate, resolve_resume
from k3train.checkpoint.subtree import restore_subtree
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.run.branch import way_to_go_on
from k3train.train.assembly import Assembly
from k3train.train.state import State

Say = Callable[[str], None]


class Begun(NamedTuple):
    """The state a run goes on from, and what it has done: steps, rows read, nominal tokens (all 0 anew)."""

    state: State
    step: int
    samples: int
    tokens: int


def begin(parts: Assembly, manager: CheckpointManager, say: Say) -> Begun:
    """The run's first state, by ``run.resume`` and ``run.init_from``.

    Raises:
      UserError: exit 31 where the named checkpoint is missing, damaged or does not fit.
    """
    run = parts.exp.run
    resume = way_to_go_on(run)
    found = resolve_resume(resume, manager.directory.parent)
    if found is None:
        state = parts.factory.fresh(run.seed)
        return Begun(_with_weights_of(parts, state, manager, say) if run.init_from else state, 0, 0, 0)
    own = found.directory == manager.directory
    source = manager if own else CheckpointManager(found.directory, parts.exp.checkpoint, peers=manager.peers, note=say)
    step = found.step
    if resume in ("auto", "must"):
        good = manager.newest_good()
        if good is None:
            raise UserError(
                f"{manager.directory}: no checkpoint verifies; nothing was loaded and nothing deleted. "
                "Move the run folder aside to start anew",
                ExitCode.CHECKPOINT,
            )
        step = good
    state, meta = source.restore(step, parts.factory.abstract)
    state = {"buffers": {}} | state  # a model without experts has none, and storage keeps no empty branch
    if own:
        manager.retire(step)
    say(f"resumed from {found.directory.parent} at step {step}")
    return Begun(state, step, _samples(parts, meta, say), meta["tokens"])


def _samples(parts: Assembly, meta: dict, say: Say) -> int:
    """The data position of a checkpoint in rows of the present length (a branch may cut them anew)."""
    was, now = meta["config"]["data"]["sequence_length"], parts.exp.data.sequence_length
    if was != now:
        say(f"rows are {now} tokens long, no longer {was}: text of the present epoch may be read twice, or not at all")
    return meta["samples"] * was // now


def _with_weights_of(parts: Assembly, state: State, manager: CheckpointManager, say: Say) -> State:
    """``state`` with the weights and router biases of ``run.init_from``."""
    run = parts.exp.run
    found = locate(run.init_from or "")
    wanted = {name: parts.factory.abstract[name] for name in ("params", "buffers")}
    loaded, missing, unexpected, reshaped = restore_subtree(
        found.directory, found.step, wanted, run.init_partial, key=None, peers=manager.peers, note=say
    )
    for what, names in (
        ("kept fresh, not in the checkpoint", missing),
        ("in the checkpoint, not used", unexpected),
        ("kept fresh, of another shape", reshaped),
    ):
        for name in names:
            say(f"init_from: {name} {what}")
    say(f"weights from {found.directory.parent} at step {found.step}")
    state = state | {name: _overlay(state[name], loaded.get(name, {})) for name in wanted}
    if "ema" in state:
        state["ema"] = jax.tree.map(lambda p: p.copy(), state["params"])
    return state


def _overlay(tree: dict, over: dict) -> dict:
    """``tree`` with the leaves that ``over`` has."""
    return {
        key: _overlay(value, over.get(key, {})) if isinstance(value, dict) else over.get(key, value)
        for key, value in tree.items()
    }
