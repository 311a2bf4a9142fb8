"""The loop under signals and death in each of its phases; one process, and one compilation for all tests.

``os._exit`` raises here, so that the test goes on where a process would have ended.
"""

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from launch import last_exit, values

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.course import Course
from k3train.data.loader import Loader
from k3train.experiment import Experiment
from k3train.run import supervision
from k3train.run.directory import read_attempts
from k3train.run.signals import SAVED, exit_code
from k3train.train import loop, step
from k3train.train.evaluate import Evaluator
from k3train.train.saver import Saver

STEPS = 6


class Left(BaseException):
    """The process would have ended here."""


class Killed(BaseException):
    """As kill -9, but for this thread: nothing is recorded any more."""


class Bench:
    """Runs attempts at one small experiment, compiled once."""

    def __init__(self, folder: Path):
        self.folder, self._parts, self._steps, self._score = folder, None, {}, None
        tiny.write_text(folder)
        self.patch = pytest.MonkeyPatch()
        assemble, compile_step, compile_score = loop.assemble, step.compile_step, Evaluator.compile

        def assemble_once(exp: Experiment):
            self._parts = self._parts or assemble(exp)
            kernels, course = self._parts.exp.kernels, Course(exp.train.stages(exp.data.sequence_length))
            exp = exp.model_copy(update={"kernels": kernels})
            return dataclasses.replace(self._parts, exp=exp, course=course).going_on(0, 0, 0)

        def compile_once(parts):
            key = parts.exp.train.global_batch, parts.exp.data.sequence_length, parts.total_tokens
            self._steps[key] = self._steps.get(key) or compile_step(parts)
            return self._steps[key]

        def compile_score_once(evaluator):
            if self._score is None:
                compile_score(evaluator)
                self._score = evaluator._score
            evaluator._score = self._score

        self.patch.setattr(loop, "assemble", assemble_once)
        self.patch.setattr(step, "compile_step", compile_once)
        self.patch.setattr(Evaluator, "compile", compile_score_once)

    def experiment(self, name: str, **sections) -> Experiment:
        given = {"train": {"steps": STEPS}, "eval": {"every": 3}, "checkpoint": {"every": 2, "keep": 9}, **sections}
        exp = tiny.experiment(self.folder, model=tiny.SHALLOW, **given)
        return exp.model_copy(update={"run": exp.run.model_copy(update={"dir": str(self.folder / name)})})


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.patch.undo()


@pytest.fixture(scope="module")
def whole(bench: Bench) -> Path:
    """An undisturbed run."""
    assert loop.train(bench.experiment("whole")) == ExitCode.FINISHED
    return bench.folder / "whole"


@pytest.fixture(autouse=True)
def no_exit(monkeypatch):
    def leave(code: int) -> None:
        raise Left(int(code))

    monkeypatch.setattr(supervision.os, "_exit", leave)


def train(exp: Experiment) -> tuple[int, bool, float]:
    """Exit code, whether the process had to leave, seconds since the last signal of ``when``."""
    try:
        code, left = int(loop.train(exp)), False
    except Left as end:
        code, left = end.args[0], True
    return code, left, time.monotonic() - sent[-1] if sent else 0.0


sent: list[float] = []


def signal_self(number: signal.Signals) -> None:
    sent.append(time.monotonic())
    os.kill(os.getpid(), number)


class Gate:
    """Stops the thread that comes through, tells the signal to be sent, and opens at the end of the test."""

    def __init__(self, number: signal.Signals):
        self._number, self.opened = number, threading.Event()

    def __call__(self) -> None:
        signal_self(self._number)
        assert self.opened.wait(60)


@pytest.fixture
def gate(request):
    made = Gate(request.param)
    sent.clear()
    yield made
    made.opened.set()
    time.sleep(0.05)  # the thread that was held goes on into nothing


def kill_before(monkeypatch, step: int) -> None:
    """The next attempt dies when it asks for the batch of ``step``."""
    next_batch = loop.Run.next_batch

    def dying(run):
        if run.phases.step == step - 1:
            run.saver.manager.wait()  # a thread outlives this death, though no process outlives a real one
            monkeypatch.setattr(loop.Run, "next_batch", next_batch)
            raise Killed
        return next_batch(run)

    monkeypatch.setattr(loop.Run, "next_batch", dying)


def same_as(run: Path, whole: Path) -> None:
    """The run repeats the undisturbed one: every step once, every evaluation once, the same numbers."""
    for key in ("train/loss", "data/batch_hash", "train/grad_norm", "eval/holdout/loss", "train/loss_ema"):
        assert values(run, key) == values(whole, key), key
    assert state_hash(run) == state_hash(whole)


def state_hash(run: Path) -> dict:
    manifest = json.loads((run / "checkpoints" / str(STEPS) / "manifest.json").read_text())
    return manifest["state_hash"]


def test_the_undisturbed_run(whole: Path):
    assert sorted(values(whole)) == [1, 2, 3, 4, 5, 6] and sorted(values(whole, "eval/holdout/loss")) == [3, 6]
    status = json.loads((whole / "status.json").read_text())
    assert status["state"] == "ended" and status["last_exit"]["code"] == 0 and status["checkpoint"] == STEPS
    assert 0 < status["goodput"]["goodput"] < 1 and status["seconds"]["compile"] > 0
    assert status["seconds"]["save"] > 0 and status["seconds"]["eval"] > 0
    assert abs(sum(status["seconds"].values()) - status["goodput"]["wall"]) < 1


@pytest.mark.parametrize("gate", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT], indirect=True)
def test_in_the_compilation(bench: Bench, whole: Path, gate: Gate, monkeypatch):
    """Nothing is lost where a checkpoint was resumed from; a fresh run has none, and only a user does not mind."""
    name = f"compile-{gate._number.name}"
    compile_steps = loop.compile_steps
    monkeypatch.setattr(loop, "compile_steps", lambda *_: gate())
    code, left, seconds = train(bench.experiment(name))
    fresh = ExitCode.STOPPED_SAVED if gate._number == signal.SIGINT else ExitCode.PREEMPTED_LOST
    assert (code, left) == (fresh, True) and seconds < 5
    assert last_exit(bench.folder / name)["code"] == code
    assert gate._number.name in last_exit(bench.folder / name)["reason"]
    monkeypatch.setattr(loop, "compile_steps", compile_steps)
    kill_before(monkeypatch, 4)
    with pytest.raises(Killed):
        loop.train(bench.experiment(name))
    with monkeypatch.context() as context:  # as long as it is being restored it is there all the same
        context.setattr(loop, "begin", lambda *_: gate())
        assert train(bench.experiment(name))[:2] == (exit_code(gate._number.name, kept=True), True)
    monkeypatch.setattr(loop, "compile_steps", lambda *_: gate())
    code, left, seconds = train(bench.experiment(name))
    assert (code, left) == (exit_code(gate._number.name, kept=True), True) and seconds < 5


@pytest.mark.parametrize("gate", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT], indirect=True)
def test_in_the_wait_for_data(bench: Bench, whole: Path, gate: Gate, monkeypatch):
    name = f"data-{gate._number.name}"
    following = Loader.__next__

    def slow(loader):
        if loader.step == 3:
            gate()
        return following(loader)

    monkeypatch.setattr(Loader, "__next__", slow)
    code, left, seconds = train(bench.experiment(name))
    assert (code, left) == (SAVED[gate._number.name], True) and seconds < 10
    assert sorted(values(bench.folder / name)) == [1, 2, 3] and last_exit(bench.folder / name)["step"] == 3
    monkeypatch.setattr(Loader, "__next__", following)
    assert train(bench.experiment(name))[:2] == (0, False)
    same_as(bench.folder / name, whole)


def during(monkeypatch, owner: type, name: str, number: signal.Signals, when: Callable[..., bool]) -> None:
    """Send a signal once, just before ``owner.name`` is called with arguments that ``when`` wants."""
    original = getattr(owner, name)
    done = []

    def wrapped(self, *args, **options):
        if not done and when(self, *args):
            done.append(1)
            signal_self(number)
            time.sleep(0.05)
        return original(self, *args, **options)

    monkeypatch.setattr(owner, name, wrapped)


def test_in_the_evaluation(bench: Bench, whole: Path, monkeypatch):
    """It is not finished, the state is saved, and the next attempt evaluates what this one did not."""
    sent.clear()
    during(monkeypatch, Evaluator, "__call__", signal.SIGUSR2, lambda *_: True)
    code, left, seconds = train(bench.experiment("eval"))
    assert (code, left) == (ExitCode.TIME_LIMIT_SAVED, False) and seconds < 10
    assert values(bench.folder / "eval", "eval/holdout/loss") == {}
    assert last_exit(bench.folder / "eval")["step"] == 3
    assert train(bench.experiment("eval"))[0] == 0
    same_as(bench.folder / "eval", whole)


def test_in_the_last_evaluation(bench: Bench, whole: Path, monkeypatch):
    sent.clear()
    during(monkeypatch, Evaluator, "__call__", signal.SIGTERM, lambda *_: values(bench.folder / "last").keys() >= {6})
    assert train(bench.experiment("last"))[0] == ExitCode.PREEMPTED_SAVED
    assert train(bench.experiment("last"))[0] == 0
    same_as(bench.folder / "last", whole)
    with monkeypatch.context() as context:  # once more changes nothing, and need not be compiled
        context.setattr(loop, "compile_steps", lambda *_: pytest.fail("compiled"))
        assert train(bench.experiment("last"))[0] == 0
    same_as(bench.folder / "last", whole)


def test_a_run_that_begins_at_its_end_is_refused(bench: Bench, whole: Path):
    """It would end as finished and hold no checkpoint."""
    exp = bench.experiment("late", run={"dir": "-", "resume": f"{whole}@{STEPS}"})
    with pytest.raises(UserError, match=f"nothing is left to train: this run is to have {STEPS} steps") as refused:
        loop.train(exp)
    assert refused.value.exit_code == ExitCode.CONFIG


def test_in_a_save(bench: Bench, whole: Path, monkeypatch):
    sent.clear()
    during(monkeypatch, Saver, "save", signal.SIGINT, lambda saver, state, now, kind: now.step == 4)
    code, left, seconds = train(bench.experiment("save"))
    assert (code, left) == (ExitCode.STOPPED_SAVED, False) and seconds < 10
    assert last_exit(bench.folder / "save")["step"] == 4
    assert train(bench.experiment("save"))[0] == 0
    same_as(bench.folder / "save", whole)


def test_killed_between_a_checkpoint_and_its_metrics(bench: Bench, whole: Path, monkeypatch):
    """The saved step's line is on the disk before its checkpoint is; what came after is done, and written, anew."""
    save = Saver.save

    def save_and_die(saver, state, now, kind, block=False):
        save(saver, state, now, kind, block=True)
        raise Killed

    monkeypatch.setattr(Saver, "save", save_and_die)
    with pytest.raises(Killed):
        loop.train(bench.experiment("killed"))
    monkeypatch.setattr(Saver, "save", save)
    kill_before(monkeypatch, 4)
    with pytest.raises(Killed):
        loop.train(bench.experiment("killed"))
    run = bench.folder / "killed"
    assert train(bench.experiment("killed"))[0] == 0
    same_as(run, whole)
    lines = read_attempts(run)
    assert [(line["event"], line["attempt"]) for line in lines] == [
        ("start", 1), ("lost", 1), ("start", 2), ("lost", 2), ("start", 3), ("end", 3),
    ]  # fmt: skip
    assert json.loads((run / "status.json").read_text())["goodput"]["idle"] > 0


def test_strict_determinism_goes_on_in_the_same_surroundings_only(bench: Bench, whole: Path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    exp, run = bench.experiment("strict", run={"determinism": "strict"}), bench.folder / "strict"
    kill_before(monkeypatch, 4)
    with pytest.raises(Killed):
        loop.train(exp)
    before = (run / "attempts.jsonl").read_text()
    jaxlib = json.loads(before.splitlines()[0])["versions"]["jaxlib"]
    (run / "attempts.jsonl").write_text(before.replace(f'"jaxlib": "{jaxlib}"', '"jaxlib": "0.1"'))
    with pytest.raises(UserError, match=f"versions.jaxlib: was 0.1, now {jaxlib}") as refused:
        loop.train(exp)
    assert refused.value.exit_code == ExitCode.RUN_FOLDER
    assert last_exit(run)["code"] == ExitCode.RUN_FOLDER
    (run / "attempts.jsonl").write_text(before)
    assert train(exp)[0] == 0
    same_as(run, whole)


def test_weights_that_are_not_finite_are_never_saved_and_end_the_run(bench: Bench, whole: Path, monkeypatch):
    """An update that the guard does not hold back (its norms cost memory) destroys the weights, and no checkpoint."""
    compile_steps, exp = loop.compile_steps, bench.experiment("lost", checkpoint={"every": 2, "keep": 1})

    def compile_destroying(parts, first):
        ((shape, step),) = compile_steps(parts, first).items()

        def destroying(state, batch, tokens):
            state, out = step(state, batch, tokens)
            if int(state["step"]) == 4:
                state = state | {"params": jax.tree.map(lambda w: w * jnp.inf, state["params"])}
                out["optim"]["param_norm"] = jnp.float32(jnp.inf)
            return state, out

        return {shape: destroying}

    monkeypatch.setattr(loop, "compile_steps", compile_destroying)
    assert train(exp)[0] == ExitCode.NON_FINITE
    ended = last_exit(bench.folder / "lost")
    assert "not finite after step 4" in ended["reason"]
    assert sorted(p.name for p in (bench.folder / "lost" / "checkpoints").iterdir() if p.name.isdigit()) == ["2"]
    monkeypatch.setattr(loop, "compile_steps", compile_steps)
    assert train(exp)[0] == 0
    same_as(bench.folder / "lost", whole)


def test_a_curriculum_of_lengths_and_batches(bench: Bench, monkeypatch):
    """Three steps of 8 half rows, then 4 whole rows a step; killed about the change, the run goes on the same."""
    curriculum = [{"tokens": 0, "sequence_length": 16, "global_batch": 8, "accumulation": 2}, {"tokens": 300}]
    sections = {"train": {"steps": STEPS, "curriculum": curriculum}, "checkpoint": {"every": 1, "keep": 9}}
    assert loop.train(bench.experiment("course", **sections)) == ExitCode.FINISHED
    course = bench.folder / "course"
    lines = [json.loads(line) for line in (course / "metrics.jsonl").read_text().splitlines()]
    told = {line["step"]: (line["tokens"], line["samples"]) for line in lines if "train/loss" in line}
    assert told == {n: (n * 128, n * 4) for n in range(1, STEPS + 1)}
    for at in (3, 4, 5):
        kill_before(monkeypatch, at)
        with pytest.raises(Killed):
            loop.train(bench.experiment(f"course{at}", **sections))
        assert loop.train(bench.experiment(f"course{at}", **sections)) == ExitCode.FINISHED
        same_as(bench.folder / f"course{at}", course)
