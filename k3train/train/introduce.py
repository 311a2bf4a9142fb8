"""What is about to be trained, as tables for the user."""

import jax
from rich.console import Console
from rich.table import Table

from k3train.data.course import Leg
from k3train.data.reading import Reading
from k3train.data.report import usage_table
from k3train.models.counts import counts
from k3train.optim.groups import group_table
from k3train.optim.groups import render as render_groups
from k3train.parallel.axes import render as render_shards
from k3train.parallel.axes import sharding_report
from k3train.parallel.moonep import report
from k3train.parallel.moonep.config import resolve, weigh
from k3train.train.assembly import Assembly


def introduce(parts: Assembly, console: Console, reading: Reading, samples: int) -> None:
    """Prints what is about to be trained: sizes, mesh, kernels, optimizer groups, and several sources' epochs.

    Args:
      reading: the rows of the run.
      samples: those of the whole run.
    """
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
        *(steps_of(leg, len(parts.course.legs) > 1) for leg in parts.course.legs),
        ("run", f"{parts.steps:,} steps, {parts.total_tokens:,} tokens"),
        (
            "compute",
            f"{exp.train.compute_dtype}, remat {exp.train.remat}, "
            f"{parts.flops(exp.data.sequence_length) / 1e6:.1f} MFLOP a token",
        ),
    ):
        table.add_row(name, value)
    for op, implementation, why in parts.kernels:
        table.add_row(f"kernel {op}", f"{implementation} ({why})")
    console.print(table)
    params = parts.factory.abstract["params"]
    if parts.mesh.size > 1:
        console.print(render_shards(sharding_report(parts.mesh, params, parts.decoder.specs())))
    if parts.mesh.shape["expert"] > 1 and exp.model.moe is not None:
        console.print(transports(parts))
    console.print(render_groups(group_table(params, parts.decoder.specs(), exp.optim)))
    if reading.mixture is not None:
        console.print(usage_table(reading, samples))


def steps_of(leg: Leg, several: bool) -> tuple[str, str]:
    """A line on the steps of a leg, and since when they are so where there are ``several`` legs."""
    since = f" from step {leg.step + 1:,}, {leg.tokens:,} tokens on" if several else ""
    return "step", f"{leg.rows} rows x {leg.length} = {leg.step_tokens:,} tokens{since}"


def transports(parts: Assembly) -> Table:
    """How tokens travel to their experts, and what ``auto`` weighs."""
    exp, moe = parts.exp, parts.exp.model.moe
    assert moe is not None
    ranks = parts.mesh.shape["expert"]
    tokens = exp.train.global_batch // exp.train.accumulation * exp.data.sequence_length // parts.mesh.size
    sizes = (ranks, moe.top_k, tokens, moe.expert_width(exp.model.hidden_size), parts.compute_dtype.itemsize)
    options = exp.moonep.options
    return report.render(resolve(options, *sizes), weigh(*sizes, options.capacity)[1])
