"""Times the train step of an experiment on random tokens: no data, no run folder.

    python scripts/bench/train_step.py configs/experiments/quickstart.yaml --steps 20
    python scripts/bench/train_step.py configs/experiments/k3_400m.yaml train.global_batch=12 --json step.json
    python scripts/bench/train_step.py CONFIG --profile-out DIR && python scripts/bench/profile_table.py DIR

The step is the one that training compiles, on the experiment's own mesh. Every step is waited for, so that what the
host does between steps is not hidden as it is in training. Rows are packed with documents of random lengths; four
batches take turns. XLA's own account of memory counts one device.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.config.errors import UserError
from k3train.config.load import load
from k3train.data.batch import Batch
from k3train.experiment import Experiment
from k3train.metrics.throughput import device_memory_peak_gib, peak_flops, speed
from k3train.train.assembly import Assembly, assemble
from k3train.train.step import compile_step

WARM_UP, BATCHES, PROFILED = 3, 4, 2


def random_batch(parts: Assembly, rng: np.random.Generator) -> Batch:
    """Random tokens in documents of 256 tokens on average, a few tokens of padding at each row's end."""
    rows, length = parts.exp.train.global_batch, parts.exp.data.sequence_length
    tokens = rng.integers(0, parts.exp.model.vocab_size, (rows, length), dtype=np.int32)
    documents = 1 + np.cumsum(rng.random((rows, length)) < 1 / 256, axis=1, dtype=np.int32)
    documents[:, length - length // 100 :] = 0
    targets, following = np.roll(tokens, -1, axis=1), np.roll(documents, -1, axis=1)
    mask = (documents == following) & (documents > 0)
    mask[:, -1] = False
    host = Batch(tokens, np.where(mask, targets, 0), documents, mask)
    return Batch(*map(parts.feed(rows), host))


def measure(parts: Assembly, steps: int, profile: Path | None) -> dict:
    """Every figure of the table, by name; numbers are plain, so that they go into JSON."""
    began = time.perf_counter()
    step = compile_step(parts)
    compile_s = time.perf_counter() - began
    rng = np.random.default_rng(0)
    batches = [random_batch(parts, rng) for _ in range(BATCHES)]
    state, times = parts.factory.fresh(parts.exp.run.seed), []

    def one(number: int) -> None:
        nonlocal state
        state, outputs = step(
            state, batches[number % BATCHES], jnp.float32((number + 1) * parts.course.legs[0].step_tokens)
        )
        jax.block_until_ready(outputs)

    for number in range(WARM_UP + steps):
        began = time.perf_counter()
        one(number)
        times.append(time.perf_counter() - began)
    times = times[WARM_UP:]
    if profile is not None:
        with jax.profiler.trace(str(profile / "profile")):
            for number in range(PROFILED):
                one(number)
    device, median = jax.devices()[0], float(np.median(times))
    rates = speed(
        parts.course.legs[0].step_tokens,
        median,
        jax.device_count(),
        parts.flops(parts.exp.data.sequence_length),
        peak_flops(device.device_kind, parts.compute_dtype.name),
    )
    memory = step.memory_analysis()  # type: ignore[attr-defined]
    mib = lambda name: None if memory is None else getattr(memory, name) / 2**20  # noqa: E731
    return {
        "step median, s": median,
        "step p10, s": float(np.percentile(times, 10)),
        "step p90, s": float(np.percentile(times, 90)),
        "tokens/s": rates["perf/tokens_per_s"],
        "MFU": rates["perf/mfu"],
        "compile, s": compile_s,
        "peak device memory, GiB": device_memory_peak_gib(jax.local_devices()),
        "XLA temporary, MiB": mib("temp_size_in_bytes"),
        "XLA arguments, MiB": mib("argument_size_in_bytes"),
        "XLA results, MiB": mib("output_size_in_bytes"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--steps", type=int, default=20, help=f"timed steps, after {WARM_UP} that are not")
    parser.add_argument("--profile-out", type=Path, metavar="DIR", help=f"write a profile of {PROFILED} more steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_intermixed_args()
    try:
        parts = assemble(load(args.config, args.overrides, Experiment).experiment)
    except UserError as error:
        raise SystemExit(str(error)) from None
    device = jax.devices()[0]
    where = f"{jax.device_count()} x {device.device_kind}, jax {jax.__version__}"
    with jax.set_mesh(parts.mesh):
        figures = measure(parts, args.steps, args.profile_out)
    exp = parts.exp
    shape = f"{exp.train.global_batch} rows x {exp.data.sequence_length}"
    table = Table(title=f"{args.config}, {shape}, {exp.train.compute_dtype}, remat {exp.train.remat}; {where}")
    table.add_column("")
    table.add_column(f"{args.steps} steps", justify="right")
    for name, value in figures.items():
        table.add_row(name, "-" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"config": args.config, "overrides": args.overrides, "where": where} | figures))


if __name__ == "__main__":
    main()
