"""The host loop: from an experiment to a trained model. Reads top to bottom."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.section import Drift
from k3train.data.batch import Batch
from k3train.experiment import Experiment
from k3train.infer.generate import Generator
from k3train.metrics.progress import Progress
from k3train.metrics.writers.jsonl import JsonlWriter, read_jsonl, set_aside
from k3train.parallel import coordination, distributed
from k3train.run.branch import parent_of
from k3train.run.determinism import COST, Strict, read_kept, refuse_changes
from k3train.run.directory import METRICS, RunDirectory
from k3train.run.environment import facts, git_commit, versions
from k3train.run.identity import TOKENIZER_KEY, store_key
from k3train.run.identity import render as render_changes
from k3train.run.supervision import Stopped, Supervision
from k3train.train.anomalies import AnomalyLog
from k3train.train.assembly import assemble, open_data
from k3train.train.begin import agree, begin
from k3train.train.check_experts import check_experts
from k3train.train.evaluate import Evaluator
from k3train.train.introduce import introduce
from k3train.train.memory import out_of_memory
from k3train.train.profiler import Profiler
from k3train.train.record import LOADS, SAMPLES, Moment, Recorder
from k3train.train.rows import Rows
from k3train.train.saver import Saver
from k3train.train.step import compile_steps

StepFunctions = dict[tuple[int, int, int], Callable]
Outcome = tuple[ExitCode, str]
"""How an attempt ended, and why."""


def train(exp: Experiment, began: float | None = None) -> ExitCode:
    """Trains ``exp`` to its end or to a stop request; returns how it ended.

    Where the process cannot end in the ordinary way (a compilation goes on, another process is gone) it does not
    return, but ends with the exit code.

    Args:
      began: wall clock of the process's start; now by default.

    Raises:
      UserError: a fault the user can mend; what was saved stays.
    """
    main = distributed.process_index() == 0
    exp = exp.absolute()  # what the run folder keeps must hold from any working directory
    with supervise(exp, time.time() if began is None else began) as watch, ExitStack() as stack:
        try:
            software = {"versions": versions(), "git_commit": git_commit()}
            agree({distributed.NUM_PROCESSES: distributed.process_count(), **software, **exp.model_dump(mode="json")})
            parent = parent_of(exp) if main else None
            folder = stack.enter_context(
                RunDirectory(
                    exp.run.dir,
                    exp.model_dump(mode="json"),
                    main=main,
                    process=distributed.process_index(),
                    mirror=exp.run.mirror,
                    parent=parent,
                )
            )
            watch.attach(folder)
            code, reason = Run(exp, folder, watch, main).go()
        except Exception as error:
            refused = out_of_memory(error, exp)
            watch.failed(refused or error)
            if refused is not None:
                raise refused from error
            raise
        if watch.must_leave:
            watch.leave(code, reason)
        folder.end_attempt(code, reason, watch.phases.step)
        return code


def supervise(exp: Experiment, began: float) -> Supervision:
    """What watches over the run on this process."""
    several = distributed.process_count() > 1
    return Supervision(
        exp.run,
        began,
        distributed.process_index(),
        distributed.process_count(),
        coordination.Notes() if several else None,
        distributed.coordinator_address(),
        distributed.reached_stop,
    )


class Run:
    """One attempt at a run."""

    def __init__(self, exp: Experiment, folder: RunDirectory, watch: Supervision, main: bool):
        self.exp, self.folder, self.watch, self.main = exp, folder, watch, main
        self.phases = watch.phases
        self.console = Console(quiet=not main, highlight=False, soft_wrap=True)
        self.first, self.sampled = 0, False
        kept = read_kept(folder.path) if main and exp.run.determinism == "strict" else None
        self.strict = Strict(coordination.broadcast(kept)) if exp.run.determinism == "strict" else None
        self.saver = Saver(exp, folder, watch.phases, self.say, main)
        watch.kept = lambda: self.saver.holds(watch.phases.step)
        if folder.changes:
            self.console.print(render_changes(folder.changes, "changed keys"))

    def say(self, text: str) -> None:
        """A line to the user, from process 0."""
        self.console.print(text, markup=False)

    def go(self) -> Outcome:
        """Trains; returns exit code and reason."""
        try:
            self.watch.aside(self.prepare)
            with self.console.status("making or reading the first state"), self.phases.within("restore"):
                self.watch.aside(self.restore)
            self.open_records()
        except Stopped:
            return self.turn_back()
        try:
            with jax.set_mesh(self.parts.mesh):
                if self.ended_before():
                    return self.finish(self.first)
                step_fns = self.compile()
                with self.progress:
                    return self.steps(step_fns)
        except Stopped:
            return self.turn_back()
        finally:
            if not self.watch.must_leave:
                self.loader.close()
            self.recorder.close()
            if self.strict is not None:
                self.strict.close()

    def turn_back(self) -> Outcome:
        """Ends before the first step, as was asked; nothing is new since the checkpoint to go on from, if any."""
        self.watch.turned_back()
        kept = self.first > 0 or bool(self.saver.manager.steps())
        self.say(f"{self.watch.stop.describe()}; no step was done in this attempt")
        return self.watch.stop_code(kept), self.watch.stop.describe()

    # Before the first step

    def prepare(self) -> None:
        """Puts model and optimizer together, prepares the data where it is absent."""
        self.parts = assemble(self.exp)
        self.exp = self.parts.exp
        self.stores = open_data(self.exp, self.console.print)
        claims = {store_key(name): content for name, content in self.stores.fingerprints.items()}
        for key, value in (claims := claims | {TOKENIZER_KEY: self.parts.tokenizer.fingerprint}).items():
            self.folder.claim(key, value)
        agree(claims)
        self.evaluator = Evaluator(self.parts, self.stores) if self.stores.holdout_tokens > 1 else None
        if self.evaluator is None:
            self.say("nothing is held out, so nothing will be evaluated; raise data.holdout for held-out loss")
        self.generator = Generator(
            self.parts.decoder, self.parts.tokenizer, self.parts.compute_dtype, add_bos=self.exp.data.add_bos
        )
        for prompt in self.exp.sample.prompts:
            self.generator.encode(prompt)  # refuse now what would end the run later

    def restore(self) -> None:
        """Makes or reads the state; opens the data where it goes on."""
        self.state, self.first, position, tokens = begin(self.parts, self.saver.manager, self.say)
        self.parts = self.parts.going_on(self.first, position, tokens)
        self.saver.begun(self.first)
        self.saver.facts = {"store": self.stores.fingerprint, "mesh": dict(self.parts.mesh.shape)}
        self.rows = Rows(self.parts, self.stores, self.say)
        self.loader = self.rows.loader

    def open_records(self) -> None:
        """Begins the attempt in the run folder; lines of steps that will be done anew are set aside."""
        self.phases.step = self.first
        if self.strict is not None:
            refuse_changes(self.folder.changes, self.folder.surroundings(facts()))
            self.say(COST)
        attempt = self.folder.begin_attempt(facts(), self.first or None, self.phases)
        if self.folder.status is not None:
            self.folder.status.checkpoint = lambda: self.saver.manager.newest_verified
        around = [change for change in self.folder.changes if change.drift == Drift.DERIVED]
        if around:
            self.console.print(render_changes(around, "changed surroundings"))
        introduce(self.parts, self.console, self.loader.reading, self.now(self.parts.steps).samples)
        keep_to, path = self.first or -1, self.folder.path
        # A bar only where somebody watches, on process 0.
        self.progress = Progress(self.parts.steps, self.first, self.exp.metrics.every, console=self.console)
        writer = anomalies = None
        if self.main:
            writer = JsonlWriter(path / METRICS, attempt, keep_to)
            anomalies = AnomalyLog(path, attempt, keep_to, self.loader)
            for name in (SAMPLES, LOADS):
                set_aside(path / name, keep_to, attempt)
        self.recorder = Recorder(self.parts, path, writer, self.progress, anomalies)
        self.saver.recorder = self.recorder

    def compile(self) -> StepFunctions:
        """The compiled train steps; evaluation is compiled as well, so that a fault of it shows now."""
        with self.console.status("compiling"), self.phases.within("compile"):
            if not self.console.is_terminal:  # where no spinner shows
                self.say("compiling")
            began = time.monotonic()
            step_fns = self.watch.aside(self.on_mesh, compile_steps, self.parts, self.first)
            seconds = time.monotonic() - began
            if self.evaluator is not None:
                self.watch.aside(self.on_mesh, self.evaluator.compile)
            self.recorder.note(perf__compile_s=seconds)
            self.say(f"compiled in {time.monotonic() - began:.1f} s")  # what was waited, the evaluation included
            if self.strict is not None and self.main:
                self.strict.keep(self.folder.path)
            self.watch.ready()
        return step_fns

    def on_mesh(self, function: Callable, *args: object) -> object:
        """``function(*args)`` with the run's mesh set, which each thread must do for itself."""
        with jax.set_mesh(self.parts.mesh):
            return function(*args)

    # The steps

    def steps(self, step_fns: StepFunctions) -> Outcome:
        """The steps themselves, and what happens between them."""
        step = self.first
        profiler = Profiler(self.exp.metrics.profile_steps, self.folder.path)
        self.recorder.start(step)
        self.phases.enter("step")
        try:
            if self.evaluation_due(step) and not self.has_line(METRICS, step, "eval/holdout/loss"):
                self.evaluate(step)  # the attempt before was stopped in it
            while step < self.parts.steps:
                self.give_way()
                local = self.next_batch()
                profiler.before(step + 1)
                batch, shape = self.rows.to_mesh(local, step), self.parts.course.leg(step).shape
                if self.exp.moonep.check and step == self.first:
                    parts = self.parts.shaped(self.parts.course.leg(step))
                    check = self.watch.aside(self.on_mesh, check_experts, parts, self.state, batch, self.say)
                    self.recorder.pause(check)
                tokens = jnp.float32(self.parts.course.tokens(step + 1))
                self.state, outputs = step_fns[shape](self.state, batch, tokens)
                step = self.phases.step = step + 1
                self.recorder.step(self.now(step), outputs, self.loader.epochs)
                profiler.after(step, outputs)
                if self.recorder.halted:
                    return self.halt(step, ExitCode.NON_FINITE, self.recorder.halted)
                self.between(step)
            return self.finish(step)
        except Stopped:
            return self.halt(step, None, self.watch.stop.describe())
        except UserError as error:
            if error.exit_code != ExitCode.DATA_EXHAUSTED:
                raise
            self.say(str(error))
            return self.halt(step, ExitCode.DATA_EXHAUSTED, str(error))

    def next_batch(self) -> Batch:
        """This process's rows of the next batch."""
        began = time.monotonic()
        with self.phases.within("data"):
            local = self.watch.aside(next, self.loader)
        self.recorder.wait(time.monotonic() - began)
        return local

    def between(self, step: int) -> None:
        """Evaluates, saves and samples where they are due after ``step``."""
        last = step == self.parts.steps
        if self.folder.status is not None:
            self.recorder.note(perf__goodput=self.folder.status.goodput()["goodput"])
        if last:
            return
        if self.evaluation_due(step):
            self.evaluate(step)
        self.saver.poll()
        kind = self.saver.due(step)
        if kind:
            self.saver.save(self.state, self.now(step), kind)
        if self.exp.sample.every and step % self.exp.sample.every == 0:
            self.sample(step)

    def ended_before(self) -> bool:
        """Whether an earlier attempt has done it all, so that nothing need be compiled."""
        if self.first < self.parts.steps:
            return False
        scored = not self.evaluation_due(self.first) or self.has_line(METRICS, self.first, "eval/holdout/loss")
        return scored and (not self.exp.sample.prompts or self.has_line(SAMPLES, self.first, "text"))

    def now(self, step: int) -> Moment:
        """Where the run stands after ``step``."""
        course = self.parts.course
        position = course.position(step)
        return Moment(step, position // self.exp.data.sequence_length, course.tokens(step), position)

    def evaluation_due(self, step: int) -> bool:
        """Whether the held-out documents are to be scored after ``step``."""
        by_steps = self.exp.eval.every and step % self.exp.eval.every == 0
        return self.evaluator is not None and step > 0 and bool(by_steps or step == self.parts.steps)

    def has_line(self, file: str, step: int, name: str) -> bool:
        """Whether a file of the run has ``name`` at ``step``; process 0 looks, and all get its answer."""
        path: Path = self.folder.path / file
        lines = read_jsonl(path) if self.main and path.exists() else []
        return coordination.broadcast(any(line["step"] == step and name in line for line in lines))

    def evaluate(self, step: int) -> None:
        """Scores the held-out documents and says the result.

        Raises:
          Stopped: the run is to stop; nothing is written of a part of an evaluation.
        """
        if self.evaluator is None:
            return
        self.recorder.flush()
        began = time.monotonic()
        with self.phases.within("eval"):
            score = self.evaluator(self.state["params"], self.state["buffers"], lambda done, total: self.give_way())
        seconds = time.monotonic() - began
        self.recorder.pause(seconds)
        self.recorder.event(self.now(step), score.metrics() | {"perf/eval_s": seconds})
        self.saver.manager.note_score(step, score.loss)
        self.say(
            f"step {step}: held-out loss {score.loss:.4f} nats/token, {score.bits_per_byte:.4f} bits/byte "
            f"({score.tokens:,} tokens, {seconds:.1f} s)"
            + "".join(f"; {name} {one.loss:.4f}, {one.bits_per_byte:.4f}" for name, one in score.sources.items())
        )

    def give_way(self) -> None:
        """Raises Stopped where the run is to stop here."""
        if self.watch.stops_here():
            raise Stopped

    def sample(self, step: int) -> None:
        """Lets the model write after each prompt."""
        self.recorder.flush()
        if not self.sampled and self.exp.sample.prompts:
            self.say("writing a sample; the first compiles for a while")
            self.sampled = True
        began = time.monotonic()
        with self.phases.within("sample"):
            for prompt in self.exp.sample.prompts:
                self.recorder.sample(step, prompt, self.watch.aside(self.on_mesh, self.write, prompt, step))
        self.recorder.pause(time.monotonic() - began)

    def write(self, prompt: str, seed: int) -> str:
        """The model's continuation of ``prompt``."""
        config, ids = self.exp.sample, []
        options = {"tokens": config.tokens, "temperature": config.temperature, "top_p": config.top_p, "seed": seed}
        for token in self.generator.stream(self.state["params"], self.state["buffers"], prompt, **options):
            ids.append(token)
            self.give_way()
        return self.parts.tokenizer.decode(np.asarray(ids, np.int32))

    # Ending

    def halt(self, step: int, code: ExitCode | None, reason: str) -> Outcome:
        """Saves and leaves before the run's end; without a code the stop request decides it."""
        self.recorder.flush()
        kept = self.saver.at_end(self.state, self.now(step), "temporary")
        what = f"state of step {step} saved in {self.folder.checkpoints}" if kept else f"step {step} is NOT saved"
        self.say(f"{reason}; {what if step else 'no step done'}")
        return self.watch.stop_code(kept) if code is None else code, reason

    def finish(self, step: int) -> Outcome:
        """Evaluates, saves and samples at the run's end."""
        self.recorder.flush()
        if self.recorder.lost:
            return self.halt(step, ExitCode.NON_FINITE, self.recorder.halted or "")
        if step > self.first:
            self.evaluate(step)
            if not self.saver.at_end(self.state, self.now(step), "final"):
                return ExitCode.SAVE_FAILED, f"finished, but step {step} could not be saved"
        if step > self.first or not self.has_line(SAMPLES, step, "text"):
            self.sample(step)
        self.say(f"finished at step {step}; the run lies in {self.folder.address}")
        return ExitCode.FINISHED, "finished"
