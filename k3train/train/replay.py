"""Runs steps of a past run again, compares them with what was recorded, and repeats one to see whether it repeats.

Batch k is a pure function of the store and the state before step k lies in a checkpoint or can be computed from one,
so any step can be had again: to find out whether a bad number comes from the data, from the code or from the machine.
Nothing is written.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3train.checkpoint.files import place
from k3train.checkpoint.layout import FOLDER as CHECKPOINTS
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.state_hash import state_hash
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.load import load
from k3train.config.section import Drift
from k3train.data.trace import RowTrace
from k3train.experiment import Experiment
from k3train.metrics.writers.jsonl import read_jsonl
from k3train.parallel.coordination import Peers
from k3train.run.determinism import Strict, read_kept
from k3train.run.directory import CONFIG, METRICS, read_attempts
from k3train.run.mirror import local_copy
from k3train.train.assembly import Assembly
from k3train.train.begin import Begun, begin_before
from k3train.train.load import open_run, open_run_data
from k3train.train.record import step_values
from k3train.train.rows import Rows
from k3train.train.state import State
from k3train.train.step import compile_steps

_OF_A_STEP = ("train", "optim", "mesh", "kernels")  # sections
_DETERMINISM = "run.determinism"
HASH, LOSS, NORM = "data/batch_hash", "train/loss", "train/grad_norm"


class Step(NamedTuple):
    """One step that was run again."""

    step: int
    values: dict[str, Any]
    """Metrics of the new run."""
    recorded: dict[str, Any]
    """Line of metrics.jsonl; empty where the step has none."""

    @property
    def same_batch(self) -> bool | None:
        """Whether the batch is the recorded one; None where there is no record."""
        return self.values[HASH] == self.recorded[HASH] if HASH in self.recorded else None

    @property
    def difference(self) -> float | None:
        """Largest relative difference of loss and gradient norm from the record, 0 where every bit agrees."""
        if LOSS not in self.recorded:
            return None
        return max(relative(self.values[name], recorded(self.recorded, name)) for name in (LOSS, NORM))


class Repeat(NamedTuple):
    """The last step, run once more from the same state."""

    difference: float
    """Largest relative difference of any number the step reports from that of the first time."""
    arrays: tuple[str, ...]
    """Arrays of the state after the step that are not the same to the bit."""


class Replay(NamedTuple):
    """What came out."""

    began: int
    """Step of the state it began with."""
    steps: list[Step]
    repeats: list[Repeat]
    rows: list[RowTrace]
    """What the last step read."""

    @property
    def repeatable(self) -> bool | None:
        """Whether all repetitions of the last step agree to the bit; None where there is none."""
        return not any(r.arrays or r.difference for r in self.repeats) if self.repeats else None


def replay(
    run: str | PathLike[str],
    step: int,
    times: int,
    overrides: Sequence[str],
    say: Callable[[str], None],
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Replay:
    """Runs a run's steps up to ``step`` again, from the newest checkpoint before it, and the last one ``times`` times.

    Args:
      run: the run folder, on a disk or in an object store.
      step: the last step to run, from 1.
      times: how often to run it; more than once needs room for two states on the devices.
      overrides: values that go before the run's own (a mesh for another machine).
      tick: hears how many steps of how many are done.

    Raises:
      UserError: no such run, step or checkpoint; data that is not the run's.
    """
    folder = local_copy(run)
    overrides = [*free_values_at(folder, step), *overrides]
    with as_strict_as_the_run(folder, overrides):
        return _replay(run, folder, step, times, overrides, say, tick)


@contextmanager
def as_strict_as_the_run(folder: Path, overrides: Sequence[str]) -> Iterator[None]:
    """The settings of ``run.determinism``, made before JAX looks for its devices, for the bits that the run had.

    Raises:
      UserError: exit 30 where the run's config cannot be read.
    """
    if load(folder / CONFIG, list(overrides), Experiment).experiment.run.determinism != "strict":
        yield
        return
    strict = Strict(read_kept(folder))
    try:
        yield
    finally:
        strict.close()


def _replay(
    run: str | PathLike[str],
    folder: Path,
    step: int,
    times: int,
    overrides: Sequence[str],
    say: Callable[[str], None],
    tick: Callable[[int, int], None],
) -> Replay:
    """:func:`replay`, with the settings made and the small files of the run in ``folder``."""
    opened = open_run(folder, overrides, one_device=False)
    parts, exp = opened.parts, opened.parts.exp
    manager = CheckpointManager(place(run) / CHECKPOINTS, exp.checkpoint, peers=Peers.of_this_run(), note=say)
    begun = begin_before(step, parts, manager, say)
    parts = parts.going_on(begun.step, begun.position, begun.tokens)
    if step > parts.steps:
        raise UserError(f"{run}: the run has {parts.steps} steps, so there is no step {step}", ExitCode.USAGE)
    stores = open_run_data(opened, say)
    rows = Rows(parts, stores, say)
    try:
        with jax.set_mesh(parts.mesh):
            steps, repeats = _run(parts, begun, rows, step, times, read_record(folder), tick)
    finally:
        rows.loader.close()
    return Replay(begun.step, steps, repeats, rows.loader.trace.rows(*parts.course.rows_at(step - 1)))


def _run(
    parts: Assembly,
    begun: Begun,
    rows: Rows,
    last: int,
    times: int,
    record: Mapping[int, dict],
    tick: Callable[[int, int], None],
) -> tuple[list[Step], list[Repeat]]:
    """The steps after ``begun`` up to ``last``, and the repetitions of that."""
    ahead = replace(parts, steps=last)  # what comes after is not wanted
    step_fns, course = compile_steps(ahead, begun.step), parts.course
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=parts.factory.shardings)
    state, total = begun.state, last - begun.step + times - 1

    def once(state: State, number: int) -> tuple[State, dict[str, Any]]:
        step_fn = step_fns[course.leg(number - 1).shape]
        state, out = step_fn(state, batch, jnp.float32(course.tokens(number)))
        return state, step_values(jax.device_get(out))

    steps: list[Step] = []
    before: State | None = None
    for number in range(begun.step + 1, last + 1):
        batch = rows.to_mesh(next(rows.loader), number - 1)
        if number == last and times > 1:
            before = copy(state)
        state, values = once(state, number)
        steps.append(Step(number, values, record.get(number, {})))
        tick(len(steps), total)
    if before is None:
        return steps, []
    first, hashes, repeats = steps[-1].values, state_hash(state), []
    for again in range(1, times):
        del state
        state, values = once(copy(before), last)
        difference = max(relative(values[name], first[name]) for name in values if isinstance(values[name], float))
        repeats.append(Repeat(difference, tuple(name for name, h in state_hash(state).items() if h != hashes[name])))
        tick(len(steps) + again, total)
    return steps, repeats


def relative(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); 0 where both are the same or neither is a number, infinite where only one is finite."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def recorded(line: Mapping[str, Any], name: str) -> float:
    """A metric of a line of metrics.jsonl, where NaN and infinities stand apart."""
    value = line[name]
    return float(line["nonfinite"][name]) if value is None else float(value)


def read_record(folder: Path) -> dict[int, dict]:
    """Lines of metrics.jsonl that tell of a training step, by step."""
    file = folder / METRICS
    lines = read_jsonl(file) if file.exists() else []
    return {line["step"]: line for line in lines if LOSS in line}


def free_values_at(folder: Path, step: int) -> list[str]:
    """Overrides that bring ``config.yaml``, which is the latest attempt's, back to the attempt that did ``step``.

    Within a run folder only free keys change; each attempt wrote down which. Those that a step depends on are given.
    """
    old: dict[str, Any] = {}
    starts = [line for line in read_attempts(folder) if line["event"] == "start"]
    for start in reversed(starts):
        if (start["resumed_step"] or 0) < step:
            break
        changes = start["changes"].items()
        old |= {
            key: was
            for key, (was, _, drift) in changes
            if drift == Drift.FREE and (key == _DETERMINISM or key.partition(".")[0] in _OF_A_STEP)
        }
    return [f"{key}={json.dumps(value)}" for key, value in old.items()]
