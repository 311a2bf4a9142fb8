"""What a run says of itself: step outputs become metrics.jsonl, loads.jsonl, samples.jsonl and the progress line."""

import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import jax

from k3train.config.storage import storage
from k3train.data.batch import hash_text
from k3train.metrics.progress import Progress
from k3train.metrics.summary import summarize
from k3train.metrics.throughput import device_memory_peak_gib, host_rss_gib, peak_flops, speed
from k3train.metrics.writers.jsonl import JsonlWriter
from k3train.train.anomalies import AnomalyLog, describe, halt_reason
from k3train.train.assembly import Assembly

SAMPLES, LOADS = "samples.jsonl", "loads.jsonl"
# Statistic of the step -> name that metrics/summary.py knows.
STATS = {
    "load": "moe/load",
    "router_entropy": "moe/router_entropy",
    "rank_load": "moe/rank_load",
    "redundant": "moe/redundant",
    "rounds": "moe/rounds",
    "max_logit": "attn/max_logit",
    "attnres_entropy": "attnres/entropy",
    "attnres_weight_max": "attnres/weight_max",
    "decay_mean": "kda/decay_mean",
    "decay_min": "kda/decay_min",
    "beta_mean": "kda/beta_mean",
    "state_rms": "kda/state_rms",
}
LOSSES = {"loss": "train/loss", "mtp_loss": "train/mtp_loss", "z_loss": "train/z_loss", "accuracy": "train/accuracy"}


class Moment(NamedTuple):
    """Where a run stands after a step."""

    step: int
    """Steps done."""
    samples: int
    """Whole rows read."""
    tokens: int
    """Nominal tokens trained on."""
    position: int
    """Where its data goes on (``data/course.py``)."""


class Recorder:
    """Writes down each step, one step late, so that the device never waits for the host.

    Args:
      folder: the run's.
      writer: of metrics.jsonl; None on processes other than 0.
      anomalies: of anomalies.jsonl; None on processes other than 0.
    """

    def __init__(
        self,
        parts: Assembly,
        folder: Path,
        writer: JsonlWriter | None,
        progress: Progress,
        anomalies: AnomalyLog | None,
    ):
        self._parts, self._folder, self._writer, self._progress = parts, folder, writer, progress
        device = jax.devices()[0]
        self._peak = peak_flops(device.device_kind, parts.exp.train.compute_dtype)
        self._anomalies = anomalies
        self._extra: dict = {}
        self._late: tuple[Moment, dict, dict[str, float]] | None = None
        self._mark, self._marked_step, self._paused, self._waited = time.monotonic(), 0, 0.0, 0.0
        self.halted: str | None = None
        """Why the guard ends the run, once it does; the same on every process at the same step."""
        self.lost = False
        """Whether the weights are not finite any more: such a state is of no use to anyone, and is never saved."""

    def start(self, step: int) -> None:
        """Begins to measure speed at ``step``."""
        self._mark, self._marked_step, self._paused, self._waited = time.monotonic(), step, 0.0, 0.0

    def note(self, **values: float) -> None:
        """Adds values (``perf__eval_s=3.0``) to the next line."""
        self._extra |= {name.replace("__", "/"): value for name, value in values.items()}

    def pause(self, seconds: float) -> None:
        """Leaves out ``seconds`` of evaluating, sampling or saving from the step time."""
        self._paused += seconds

    def wait(self, seconds: float) -> None:
        """Counts time spent waiting for a batch."""
        self._waited += seconds

    def step(self, now: Moment, outputs: dict, epochs: dict[str, float]) -> None:
        """Takes the outputs of the step just dispatched, still being computed, and writes down the step before it.

        Args:
          epochs: how often each source was read, of all together under an empty name.
        """
        self.flush(timed=True)
        self._late = (now, outputs, epochs)

    def flush(self, timed: bool = False) -> None:
        """Writes down the step that is held back; waits for it to be computed.

        ``timed``: between two dispatches, when the time since the last line is that of whole steps.
        """
        if self._late is None:
            return
        (now, outputs, epochs), self._late = self._late, None
        step = now.step
        out = jax.device_get(outputs)
        values = step_values(out) | {"data/epoch" + f"/{name}" * bool(name): epoch for name, epoch in epochs.items()}
        if not math.isfinite(values["train/param_norm"]):
            self.lost = True
            self.halted = f"the weights are not finite after step {step}; the checkpoints before it are kept"
        bad = bool(values["train/nonfinite"] or values["train/spike"])
        if bad:
            self._alarm(now, values, halt=bool(out["halt"]))
        due = step % self._parts.exp.metrics.every == 0 or step == self._parts.steps
        if due or bad:
            values |= (self._speed(now) if timed else {}) | self._extra
            self._extra = {}
            self._write(now, values)
        every = self._parts.exp.metrics.load_every
        if self._writer is not None and every and step % every == 0 and "load" in out["parts"]:
            append_line(self._folder / LOADS, {"step": step, "load": out["parts"]["load"].tolist()})
        self._progress.update(step, values)

    def _alarm(self, now: Moment, values: dict, *, halt: bool) -> None:
        """Says and keeps what is known of a bad step."""
        guard = self._parts.exp.optim.guard
        if self._anomalies is not None:
            self._anomalies.write(*now[:3], values)
        self._progress.print(describe(now.step, values, guard))
        if halt and not self.lost:
            self.halted = halt_reason(now.step, values, guard)

    def _speed(self, now: Moment) -> dict:
        """Speed and memory since the last line."""
        steps, course = max(now.step - self._marked_step, 1), self._parts.course
        seconds = max((time.monotonic() - self._mark - self._paused) / steps, 1e-9)
        tokens = (now.tokens - course.tokens(self._marked_step)) / steps
        out = {
            "perf/step_s": seconds,
            "perf/data_wait_s": self._waited / steps,
            "perf/hbm_peak_gib": device_memory_peak_gib(jax.local_devices()),
            "perf/host_rss_gib": host_rss_gib(),
        }
        flops = self._parts.flops(course.leg(now.step - 1).length)
        out |= speed(tokens, seconds, jax.device_count(), flops, self._peak)
        self.start(now.step)
        return out

    def _write(self, now: Moment, values: dict) -> None:
        if self._writer is not None:
            self._writer.write(*now[:3], values)

    def sync(self) -> None:
        """Brings the metrics to the disk."""
        if self._writer is not None:
            self._writer.sync()

    def close(self) -> None:
        """Closes the files."""
        for file in (self._writer, self._anomalies):
            if file is not None:
                file.close()

    def event(self, now: Moment, values: dict) -> None:
        """Writes values of their own (an evaluation)."""
        self._write(now, values)

    def sample(self, step: int, prompt: str, text: str) -> None:
        """Keeps and shows text the model wrote."""
        if self._writer is None:
            return
        append_line(self._folder / SAMPLES, {"step": step, "prompt": prompt, "text": text})
        self._progress.print(f"--- sample at step {step} ---\n{prompt}{text}\n---")


def step_values(out: dict) -> dict:
    """Metric names and values of one step's outputs (on the host)."""
    parts, guard = out["parts"], dict(out["guard"])
    values: dict = {name: float(parts[key]) for key, name in LOSSES.items() if key in parts}
    values["train/loss_ema"] = float(guard.pop("loss_mean"))
    values["train/perplexity"] = math.exp(min(values["train/loss"], 700.0))
    values["train/supervised_tokens"] = float(parts["supervised"])
    values |= {f"train/{name}": float(value) for name, value in out["optim"].items()}
    values |= {f"guard/{name}": float(value) for name, value in guard.items()}
    values |= {name: float(value) for name, value in out["clip"].items()}
    values["data/batch_hash"] = hash_text(out["data"]["hash"])
    values |= {f"data/{name}": float(out["data"][name]) for name in ("pad_frac", "docs_per_row")}
    stats = {name: parts[key] for key, name in STATS.items() if key in parts}
    return values | summarize(stats | {"moe/router_bias": out["router_bias"]})


def append_line(path: Path, value: dict) -> None:
    """Appends one JSON object to ``path``."""
    with storage(path, "write"), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
