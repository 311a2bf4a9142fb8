"""The host loop: from an experiment to a trained model. Reads top to bottom."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.policies import Kind
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.section import Drift
from k3train.data.batch import Batch
from k3train.data.loader import Loader
from k3train.experiment import Experiment
from k3train.infer.generate import Generator
from k3train.metrics.progress import Progress
from k3train.metrics.writers.jsonl import JsonlWriter
from k3train.models.counts import counts
from k3train.optim.groups import group_table
from k3train.optim.groups import render as render_groups
from k3train.parallel import distributed
from k3train.parallel.axes import batch_sharding, sharding_report
from k3train.parallel.axes import render as render_shards
from k3train.parallel.peers import Peers
from k3train.run.branch import parent_of
from k3train.run.directory import RunDirectory
from k3train.run.environment import facts, versions
from k3train.run.identity import STORE_KEY, TOKENIZER_KEY
from k3train.run.identity import render as render_changes
from k3train.run.signals import StopRequest
from k3train.train.anomalies import AnomalyLog
from k3train.train.assembly import Assembly, assemble, open_data
from k3train.train.begin import begin
from k3train.train.evaluate import Evaluator
from k3train.train.record import Moment, Recorder
from k3train.train.step import compile_step


def train(exp: Experiment) -> ExitCode:
    """Trains ``exp`` to its end or to a stop request; returns how it ended.

    Raises:
      UserError: a fault the user can mend; what was saved stays.
    """
    main = distributed.process_index() == 0
    exp = exp.absolute()  # what the run folder keeps must hold from any working directory
    parent = parent_of(exp) if main else None
    config = exp.model_dump(mode="json")
    with RunDirectory(exp.run.dir, config, main=main, parent=parent) as folder, StopRequest() as stop:
        try:
            code, reason, step = Run(exp, folder, stop, main).go()
        except BaseException as error:
            code = error.exit_code if isinstance(error, UserError) else ExitCode.BUG
            folder.end_attempt(code, f"{type(error).__name__}: {error}")
            raise
        folder.end_attempt(code, reason, step)
        return code


class Run:
    """One attempt at a run."""

    def __init__(self, exp: Experiment, folder: RunDirectory, stop: StopRequest, main: bool):
        self.folder, self.stop, self.main = folder, stop, main
        self.console = Console(quiet=not main, highlight=False, soft_wrap=True)
        if folder.changes:
            self.console.print(render_changes(folder.changes, "changed keys"))
        self.parts = assemble(exp)
        self.exp = self.parts.exp
        store = open_data(exp, self.console.print)
        self.store_fingerprint = store.fingerprint
        folder.claim(STORE_KEY, store.fingerprint)
        folder.claim(TOKENIZER_KEY, self.parts.tokenizer.fingerprint)
        self.manager = CheckpointManager(
            folder.checkpoints,
            exp.checkpoint,
            peers=Peers.of_this_run(60 * exp.checkpoint.timeout_minutes),
            run_id=folder.run_id if main else None,
            note=self.say,
        )
        self.state, self.first, self.samples, self.tokens = begin(self.parts, self.manager, self.say)
        self.parts = self.parts.going_on(self.first, self.tokens)
        self.loader = Loader(
            store.train,
            exp.data,
            exp.train.global_batch,
            exp.data.shuffle_seed,
            distributed.process_index(),
            distributed.process_count(),
            start_sample=self.samples,
        )
        self.evaluator = Evaluator(self.parts, store) if store.holdout.tokens > 1 else None
        self.generator = Generator(
            self.parts.decoder, self.parts.tokenizer, self.parts.compute_dtype, add_bos=exp.data.add_bos
        )
        for prompt in exp.sample.prompts:
            self.generator.encode(prompt)  # refuse now what would end the run later
        self.last_save = time.monotonic()
        self.saved: int | None = self.first if self.first in self.manager.steps() else None

    def say(self, text: str) -> None:
        """A line to the user, from process 0."""
        self.console.print(text, markup=False)

    def go(self) -> tuple[ExitCode, str, int]:
        """Trains; returns exit code, reason and the last step done."""
        attempt = self.folder.begin_attempt(facts(), self.first or None)
        around = [change for change in self.folder.changes if change.drift == Drift.DERIVED]
        if around:
            self.console.print(render_changes(around, "changed surroundings"))
        introduce(self.parts, self.console)
        writer = JsonlWriter(self.folder.path / "metrics.jsonl", attempt, self.first or -1) if self.main else None
        # A bar only where somebody watches, on process 0.
        progress = Progress(self.parts.steps, self.first, self.exp.metrics.every, console=self.console)
        anomalies = AnomalyLog(self.folder.path, attempt, self.first or -1, self.loader) if self.main else None
        self.recorder = Recorder(self.parts, self.folder.path, writer, progress, anomalies)
        try:
            with jax.set_mesh(self.parts.mesh):
                step_fn = self.compile()
                with progress:
                    return self.steps(step_fn)
        finally:
            self.loader.close()
            self.recorder.close()

    def compile(self) -> Callable:
        """The compiled train step; says how long it took."""
        began = time.monotonic()
        with self.console.status("compiling the train step"):
            compiled = compile_step(self.parts)
        seconds = time.monotonic() - began
        self.recorder.note(perf__compile_s=seconds)
        self.say(f"compiled in {seconds:.1f} s")
        return compiled

    def steps(self, step_fn: Callable) -> tuple[ExitCode, str, int]:
        """The steps themselves, and what happens between them."""
        step, sharding = self.first, batch_sharding(self.parts.mesh)
        profiler = Profiler(self.exp.metrics.profile_steps, self.folder.path)
        self.recorder.start(step)
        while step < self.parts.steps:
            if self.asked_to_stop():
                return self.halt(step, self.stop.exit_code, self.stop.describe())
            waiting = time.monotonic()
            try:
                local = next(self.loader)
            except UserError as error:
                if error.exit_code != ExitCode.DATA_EXHAUSTED:
                    raise
                self.say(str(error))
                return self.halt(step, ExitCode.DATA_EXHAUSTED, str(error))
            self.recorder.wait(time.monotonic() - waiting)
            profiler.before(step + 1)
            batch = Batch(*(distributed.global_array(sharding, array) for array in local))
            self.samples, self.tokens = self.loader.sample, self.tokens + self.parts.step_tokens
            self.state, outputs = step_fn(self.state, batch, jnp.float32(self.tokens))
            step += 1
            self.recorder.step(Moment(step, self.samples, self.tokens), outputs, self.loader.epoch)
            profiler.after(step, outputs)
            if self.recorder.halted:
                return self.halt(step, ExitCode.NON_FINITE, self.recorder.halted)
            self.between(step)
        return self.finish(step)

    def asked_to_stop(self) -> bool:
        """Whether any process was asked to stop; every process gets the same answer at the same step."""
        return bool(distributed.any_process(bool(self.stop)))

    def between(self, step: int) -> None:
        """Evaluates, samples and saves where they are due after ``step``."""
        last = step == self.parts.steps
        if self.exp.eval.every and step % self.exp.eval.every == 0 and not last:
            self.evaluate(step)
        if self.exp.sample.every and step % self.exp.sample.every == 0 and not last:
            self.sample(step)
        self.counting_failures(self.manager.poll)
        kind = self.manager.should_save(step, self.last_save)
        if kind is not None and not last:
            self.counting_failures(lambda: self.save(step, kind))

    def counting_failures(self, act: Callable[[], Any]) -> None:
        """Calls ``act``; a failed save is reported and counted, and ends the run after too many in a row."""
        try:
            act()
        except SaveFailed as error:
            self.recorder.note(ckpt__failures=self.manager.failures)
            if self.manager.exhausted:
                raise
            self.say(f"WARNING: {error}")

    def evaluate(self, step: int) -> None:
        """Scores the held-out documents and says the result."""
        if self.evaluator is None:
            return
        self.recorder.flush()
        began = time.monotonic()
        score = self.evaluator(self.state["params"], self.state["buffers"])
        seconds = time.monotonic() - began
        self.recorder.pause(seconds)
        self.manager.note_score(step, score.loss)
        self.recorder.event(
            Moment(step, self.samples, self.tokens),
            {
                "eval/holdout/loss": score.loss,
                "eval/holdout/bpb": score.bits_per_byte,
                "eval/holdout/tokens": score.tokens,
                "perf/eval_s": seconds,
            },
        )
        self.say(
            f"step {step}: held-out loss {score.loss:.4f} nats/token, {score.bits_per_byte:.4f} bits/byte "
            f"({score.tokens:,} tokens, {seconds:.1f} s)"
        )

    def sample(self, step: int) -> None:
        """Lets the model write after each prompt."""
        self.recorder.flush()
        began, config = time.monotonic(), self.exp.sample
        for prompt in config.prompts:
            text = self.generator.text(
                self.state["params"],
                self.state["buffers"],
                prompt,
                tokens=config.tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                seed=step,
            )
            self.recorder.sample(step, prompt, text)
        self.recorder.pause(time.monotonic() - began)

    def save(self, step: int, kind: Kind, block: bool = False) -> None:
        """Begins a checkpoint of the present state."""
        began = time.monotonic()
        meta = {
            "step": step,
            "samples": self.samples,
            "tokens": self.tokens,
            "config": self.exp.model_dump(mode="json"),
            "seed": self.exp.run.seed,
            "store": self.store_fingerprint,
            "versions": versions(),
            "mesh": dict(self.parts.mesh.shape),
            "processes": distributed.process_count(),
            "run_id": self.folder.run_id if self.main else None,
        }
        self.manager.save(step, self.state, meta, block=block, kind=kind)
        self.last_save, self.saved = time.monotonic(), step
        seconds = time.monotonic() - began
        self.recorder.pause(seconds)
        self.recorder.note(perf__save_block_s=seconds, ckpt__failures=self.manager.failures)

    def save_at_end(self, step: int, kind: Kind) -> None:
        """Makes sure that the present state is saved, and waits for it."""
        if self.saved == step:
            try:
                return self.manager.wait()
            except SaveFailed as error:
                self.say(f"WARNING: {error}; trying once more")
        if step > 0:
            self.save(step, kind, block=True)

    def halt(self, step: int, code: ExitCode, reason: str) -> tuple[ExitCode, str, int]:
        """Saves and leaves before the run's end."""
        self.recorder.flush()
        self.save_at_end(step, "temporary")
        self.say(
            f"{reason}; state of step {step} saved in {self.manager.directory}" if step else f"{reason}; no step done"
        )
        return code, reason, step

    def finish(self, step: int) -> tuple[ExitCode, str, int]:
        """Evaluates, saves and samples at the run's end."""
        self.recorder.flush()
        if step > self.first:
            self.evaluate(step)
            self.save_at_end(step, "final")
            self.sample(step)
        self.say(f"finished at step {step}; the run lies in {self.folder.path}")
        return ExitCode.FINISHED, "finished", step


class Profiler:
    """Writes a JAX profile of a span of steps into the run folder."""

    def __init__(self, span: tuple[int, ...], folder: Path):
        self._span, self._folder = span, folder / "profile"

    def before(self, step: int) -> None:
        """Starts before the first step of the span."""
        if self._span and step == self._span[0]:
            jax.profiler.start_trace(str(self._folder))

    def after(self, step: int, outputs: dict) -> None:
        """Stops after the last."""
        if self._span and step == self._span[1]:
            jax.block_until_ready(outputs)
            jax.profiler.stop_trace()


def introduce(parts: Assembly, console: Console) -> None:
    """Prints what is about to be trained: sizes, mesh, kernels, optimizer groups."""
    exp, sizes = parts.exp, counts(parts.exp.model)
    table = Table(title="run", show_header=False)
    mesh = ", ".join(f"{name} {size}" for name, size in parts.mesh.shape.items())
    for name, value in (
        ("parameters", f"{sizes.total:,} ({sizes.active:,} active a token)"),
        ("layers", f"{exp.model.layers.count}: {len(exp.model.layers.kda)} KDA, {len(exp.model.layers.mla)} MLA"),
        (
            "devices",
            f"{jax.device_count()} x {jax.devices()[0].device_kind} in {jax.process_count()} process(es): {mesh}",
        ),
        ("step", f"{exp.train.global_batch} rows x {exp.data.sequence_length} = {parts.step_tokens:,} tokens"),
        ("run", f"{parts.steps:,} steps, {parts.total_tokens:,} tokens"),
        ("compute", f"{exp.train.compute_dtype}, remat {exp.train.remat}, {parts.flops / 1e6:.1f} MFLOP a token"),
    ):
        table.add_row(name, value)
    for op, implementation, why in parts.kernels:
        table.add_row(f"kernel {op}", f"{implementation} ({why})")
    console.print(table)
    params = parts.factory.abstract["params"]
    if parts.mesh.size > 1:
        console.print(render_shards(sharding_report(parts.mesh, params, parts.decoder.specs())))
    console.print(render_groups(group_table(params, parts.decoder.specs(), exp.optim)))
