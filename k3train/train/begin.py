"""How a run begins: anew, from another run's weights, or where it left off."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.resolve import locate, resolve_resume
from k3train.checkpoint.state_hash import combined, state_hash
from k3train.checkpoint.subtree import restore_subtree
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.config import DataConfig, MixtureConfig
from k3train.data.mixture import mix, mixture_of
from k3train.parallel import coordination, distributed
from k3train.run.agreement import refuse_difference
from k3train.run.branch import way_to_go_on
from k3train.train.assembly import Assembly
from k3train.train.state import State

Say = Callable[[str], None]


class Begun(NamedTuple):
    """The state a run goes on from, and what it has done: steps, position in its data, nominal tokens (all 0 anew)."""

    state: State
    step: int
    position: int
    tokens: int


def agree(known: dict[str, Any]) -> None:
    """Every process must know the same (``run/agreement.py``); all of them ask at the same point."""
    if distributed.process_count() > 1:
        refuse_difference(distributed.process_index(), coordination.broadcast(known), known)


def begin(parts: Assembly, manager: CheckpointManager, say: Say) -> Begun:
    """The run's first state, by ``run.resume`` and ``run.init_from``.

    Raises:
      UserError: exit 31 where the named checkpoint is missing, damaged or does not fit; exit 30 where the state of
        another run is all that this one asks for.
    """
    run = parts.exp.run
    resume = way_to_go_on(run)
    found = resolve_resume(resume, manager.directory.parent)
    if found is None:
        return _anew(parts, manager, say)
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
    begun = _restored(parts, source, step, say)
    if own:
        manager.retire(step)
    elif step >= (steps := parts.going_on(step, begun.position, begun.tokens).steps):
        raise UserError(
            f"nothing is left to train: this run is to have {steps} steps, and it begins with the state of step {step} "
            f"of {found.directory.parent}. Raise train.steps or train.tokens, or begin with an earlier step"
        )
    say(f"resumed from {found.directory.parent} at step {step}, state {combined(state_hash(begun.state))}")
    return begun


def begin_before(step: int, parts: Assembly, manager: CheckpointManager, say: Say) -> Begun:
    """The newest state that leads to ``step`` (steps done, counted from 1); touches nothing in the run folder.

    That is the newest checkpoint before it that verifies, else what the run began with.

    Raises:
      UserError: the run began after that step, or its parent's checkpoint is gone.
    """
    for saved in sorted(manager.steps(), reverse=True):
        if saved >= step:
            continue
        faults = manager.verify(saved)
        if not faults:
            say(f"from checkpoint {saved}")
            return _restored(parts, manager, saved, say)
        say(f"WARNING: checkpoint {saved} is damaged and passed over: {faults[0]}")
    place, at, _ = parts.exp.run.resume.rpartition("@")
    found = locate(parts.exp.run.resume, "run.resume") if at else None
    if found is None or found.directory == manager.directory:
        say("from the beginning")
        return _anew(parts, manager, say)
    if found.step >= step:
        raise UserError(f"this run began with step {found.step} of {place}; replay step {step} there", ExitCode.USAGE)
    say(f"from the run's parent, {place} at step {found.step}")
    source = CheckpointManager(found.directory, parts.exp.checkpoint, peers=manager.peers, note=say)
    return _restored(parts, source, found.step, say)


def _anew(parts: Assembly, manager: CheckpointManager, say: Say) -> Begun:
    """No step done."""
    state = parts.factory.fresh(parts.exp.run.seed)
    return Begun(_with_weights_of(parts, state, manager, say) if parts.exp.run.init_from else state, 0, 0, 0)


def _restored(parts: Assembly, source: CheckpointManager, step: int, say: Say) -> Begun:
    """The state of a checkpoint. Where only it, or only this run, keeps averaged weights, they end or begin here."""
    abstract, meta = dict(parts.factory.abstract), source.meta(step)
    had, kept = meta["config"].get("optim", {}).get("ema") is not None, "ema" in abstract
    if had and not kept:
        abstract["ema"] = abstract["params"]
    elif kept and not had:
        del abstract["ema"]
    state, _ = source.restore(step, abstract)
    if had and not kept:
        del state["ema"]
        say("the averaged weights of the checkpoint are not kept on (optim.ema)")
    elif kept and not had:
        state["ema"] = jax.tree.map(lambda p: p.copy(), state["params"])
        say("averaged weights begin as the weights are (optim.ema)")
    state = {"buffers": {}} | state  # a model without experts has none, and storage keeps no empty branch
    return Begun(state, step, _position(parts, meta, say), meta["tokens"])


def _position(parts: Assembly, meta: dict, say: Say) -> int:
    """The data position of a checkpoint, at the border of a row where a branch cuts rows anew."""
    before, data = meta["config"]["data"], parts.exp.data
    was, now = before["sequence_length"], data.sequence_length
    if was != now:
        say(f"rows are {now} tokens long, no longer {was}: text of the present epoch may be read twice, or not at all")
    if (packing := before.get("packing", "concat")) != data.packing:
        say(f"rows are packed by {data.packing}, no longer {packing}: text of the present epoch may be read twice")
    position = meta.get("position", meta["samples"] * was)
    if was != now:
        return position // now * now
    if not _mixture_goes_on(data, before, -(-position // now)):
        say(
            "up to here the mixture is not what it was: rows of the sources' present epochs may be read twice, or not "
            "at all. Where its phases stay and one is added, every source goes on where it was"
        )
    return position


def _mixture_goes_on(data: DataConfig, before: dict[str, Any], samples: int) -> bool:
    """Whether the first ``samples`` samples are the same rows of the same sources as under the config ``before``."""
    now, was = mixture_of(data, 0), before.get("mixture")
    if now is None or was is None or data.sources is None or data.mixture is None:
        return samples == 0 or (now is None and was is None)
    if "reweight" in (was.get("used_up"), data.mixture.used_up):
        limits = {name: source.max_epochs for name, source in data.sources.items()}
        had = {name: source["max_epochs"] for name, source in before["sources"].items()}
        if (limits, data.mixture.used_up) != (had, was.get("used_up")):
            return samples == 0
    return now.agrees(mix(MixtureConfig.model_validate(was), before["sources"], data.sequence_length, 0), samples)


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
