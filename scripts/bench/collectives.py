"""What a training step moves and multiplies on a mesh, from the program compiled for it; no such devices are needed.

    python scripts/bench/collectives.py configs/experiments/k3_400m.yaml --target h200 --devices 8 mesh.fsdp=8

Prints one line for each kind of collective and mesh axis: how often a step does it (loops included), bytes that leave a
device, and the time they take at the link's rate; then FLOPs of the step's dots, and the same account of the optimizer
alone. ``--target h200`` needs jax-cuda13-plugin and a ptxas (programs of the same jaxlib compile without a GPU);
``--target cpu`` compiles for forced CPU devices.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LINKS = {"h200": 450e9 / 2, "cpu": 1e9}
"""Bytes a second that leave a device in one direction, at half of NVLink's published rate."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--target", choices=("h200", "cpu"), default="h200")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hlo", type=Path, help="folder for the programs' text")
    return parser.parse_intermixed_args()


ARGS = arguments()
os.environ["JAX_PLATFORMS"] = "cpu"
if ARGS.target == "cpu":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ARGS.devices}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from k3train.config.load import load  # noqa: E402
from k3train.experiment import Experiment  # noqa: E402
from k3train.parallel import targets  # noqa: E402
from k3train.parallel.census import Census, Moved, census  # noqa: E402
from k3train.parallel.mesh import build_mesh  # noqa: E402
from k3train.train.assembly import Assembly, assemble  # noqa: E402
from k3train.train.introduce import transports  # noqa: E402
from k3train.train.step import compile_step  # noqa: E402


def devices() -> list[Any]:
    """As many of the target, which need not exist."""
    return jax.devices()[: ARGS.devices] if ARGS.target == "cpu" else targets.devices(ARGS.target, ARGS.devices)


def compile_update(parts: Assembly) -> Any:
    """The optimizer alone, as the step calls it."""
    abstract = parts.factory.abstract
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def update(grads, opt, params, tokens):
        return parts.optimizer.update(grads, opt, params, tokens, parts.total_tokens)[:2]

    shardings = parts.factory.shardings
    whole = jax.jit(update, donate_argnums=(1, 2), out_shardings=(shardings["params"], shardings["opt"]))
    return whole.lower(abstract["params"], abstract["opt"], abstract["params"], scalar).compile()


def account(name: str, compiled: Any, seconds: float, mesh: dict[str, int], console: Console) -> dict[str, Any]:
    """Prints one program's account; the same as JSON."""
    text = compiled.as_text()
    if ARGS.hlo:
        ARGS.hlo.mkdir(parents=True, exist_ok=True)
        (ARGS.hlo / f"{name}.txt").write_text(text)
    found: Census = census(text, mesh)
    memory = compiled.memory_analysis()
    peak = getattr(memory, "peak_memory_in_bytes", 0) / 2**30
    title = f"{name}: compiled in {seconds:.0f} s, peak {peak:.2f} GiB, dots {found.flops:.4g} FLOP a device"
    console.print(listed(title, found.moved))
    if found.asked_moved:
        title = f"one turn more of every loop that runs only where the data asks ({found.asked_flops:.4g} FLOP)"
        console.print(listed(title, found.asked_moved))
    return {"compile_s": seconds, "peak_gib": peak, "flops": found.flops, "moved": [r._asdict() for r in found.moved],
            "asked_flops": found.asked_flops, "asked_moved": [r._asdict() for r in found.asked_moved]}  # fmt: skip


def listed(title: str, moved: list[Moved]) -> Table:
    """Collectives with their time at the link's rate."""
    table = Table(title=title)
    for column in ("collective", "axes", "times", "GB a device", "ms at the link's rate"):
        table.add_column(column, justify="left" if column in ("collective", "axes") else "right")
    for row in moved:
        table.add_row(row.kind, " ".join(row.axes), f"{row.times:,}", f"{row.bytes / 1e9:.4f}",
                      f"{1e3 * row.bytes / LINKS[ARGS.target]:.2f}")  # fmt: skip
    return table


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 120)
    exp: Experiment = load(ARGS.config, ARGS.overrides, Experiment).experiment
    parts = assemble(exp, build_mesh(exp.mesh, devices()))
    mesh, out = dict(parts.mesh.shape), {}
    console.print(f"{ARGS.devices} x {ARGS.target}: {mesh}, {parts.course.legs[0].step_tokens:,} tokens a step")
    if parts.mesh.shape["expert"] > 1:
        console.print(transports(parts))
    with jax.set_mesh(parts.mesh):
        for name, make in (("step", compile_step), ("optimizer", compile_update)):
            began = time.perf_counter()
            compiled = make(parts)
            out[name] = account(name, compiled, time.perf_counter() - began, mesh, console)
    step, update = (out[name]["flops"] for name in ("step", "optimizer"))
    sums = [sum(row["bytes"] for row in out[name]["moved"]) for name in ("step", "optimizer")]
    share = f"{update / step:.1%} of the step's dot FLOPs and {sums[1] / max(sums[0], 1):.1%} of its bytes"
    console.print(f"the optimizer has {share}")
    if ARGS.json:
        ARGS.json.write_text(
            json.dumps({"mesh": mesh, "tokens": parts.course.legs[0].step_tokens, **out}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
