"""``k3train replay``: run steps of a past run again and say whether they repeat."""

import argparse
import json
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from k3train.train.replay import Replay, Step

HELP = "run a step of a past run again"

_LAST, _NOTED = 10, 10  # rows of the table: last steps, and steps before them that stand out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run folder; nothing in it is changed")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the run's own"
    )
    parser.add_argument("--step", type=int, required=True, metavar="K", help="the step, from 1")
    parser.add_argument("--times", type=int, default=2, metavar="N", help="how often to run it (default 2)")
    parser.add_argument("--documents", action="store_true", help="name the documents that the step reads")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Runs the steps and prints how they compare.

    Raises:
      UserError: see ``train/replay.py``; exit 2 for numbers that make no sense.
    """
    import sys

    from k3train.checkpoint.files import place
    from k3train.config.errors import UserError
    from k3train.config.exit_codes import ExitCode

    for option, value in (("--step", args.step), ("--times", args.times)):
        if not 1 <= value < 2**31:
            raise UserError(f"{option} {value}: give 1 or more", ExitCode.USAGE)
    if not (place(args.run) / "config.yaml").exists():
        raise UserError(f"{args.run}: no run folder (it has no config.yaml)", ExitCode.USAGE)

    from rich.console import Console
    from rich.progress import Progress

    from k3train.parallel import distributed
    from k3train.parallel.joining import join

    join()

    from k3train.train.replay import replay

    main = distributed.process_index() == 0
    notes = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not main)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("compiling, then running", total=None)
        result = replay(
            args.run,
            args.step,
            args.times,
            args.overrides,
            lambda text: notes.print(text, markup=False),
            lambda done, total: bar.update(task, completed=done, total=total, description="running"),
        )
    if main:
        out = Console(file=sys.stdout, highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        if args.json:
            print(json.dumps(as_json(result)))
        else:
            _print(result, args.documents, out)
    return 0


def as_json(result: "Replay") -> dict:
    """The result in plain JSON; what is not finite reads as text."""

    def plain(value):
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "from_step": result.began,
        "steps": [
            {
                "step": step.step,
                "same_batch": step.same_batch,
                "difference": plain(step.difference),
                "values": {name: plain(value) for name, value in step.values.items()},
            }
            for step in result.steps
        ],
        "repeatable": result.repeatable,
        "repeats": [{"difference": plain(r.difference), "arrays": list(r.arrays)} for r in result.repeats],
        "rows": [row._asdict() for row in result.rows],
    }


def _print(result: "Replay", documents: bool, out: "Console") -> None:
    """Tables and a verdict."""
    last = result.steps[-1].step
    out.print(_steps_table(result))
    known = [step for step in result.steps if step.difference is not None]
    other = [str(step.step) for step in known if step.same_batch is False]
    if other:
        out.print(f"OTHER BATCHES than recorded at steps {', '.join(other)}: the data is not what the run read")
    if not known:
        out.print("metrics.jsonl has none of these steps")
    elif worst := max(step.difference or 0.0 for step in known):
        out.print(f"largest relative difference from the record: {worst:.3g} (loss, gradient norm)")
    else:
        out.print("loss and gradient norm agree with the record to the bit")
    if result.repeatable:
        out.print(
            f"step {last} ran {len(result.repeats) + 1} times and repeats to the bit, the state after it included"
        )
    elif result.repeats:
        arrays = sorted({name for repeat in result.repeats for name in repeat.arrays})
        worst = max(repeat.difference for repeat in result.repeats)
        some = ", ".join(arrays[:5]) + (", ..." if len(arrays) > 5 else "")
        out.print(
            f"step {last} DOES NOT REPEAT in {len(result.repeats) + 1} runs: largest relative difference of its "
            f"metrics {worst:.3g}; {len(arrays)} arrays differ ({some})"
        )
    if documents:
        out.print(_rows_table(result))


def _steps_table(result: "Replay") -> "Table":
    from rich.table import Table

    from k3train.train.replay import LOSS, NORM, recorded

    table = Table(title=f"replayed from step {result.began}")
    for title in ("step", "loss", "recorded", "gradient norm", "recorded", "batch", "guard"):
        table.add_column(title, justify="left" if title in ("batch", "guard") else "right")
    batch = {None: "no record", True: "same", False: "OTHER"}
    shown = worth_showing(result.steps)
    if len(shown) < len(result.steps):
        table.caption = f"{len(shown)} of {len(result.steps)} steps; --json has all"
    for step in shown:
        values, cells = step.values, []
        for name in (LOSS, NORM):
            cells += [f"{values[name]:.6g}", f"{recorded(step.recorded, name):.6g}" if step.recorded else "-"]
        table.add_row(str(step.step), *cells, batch[step.same_batch], ", ".join(_flags(step)))
    return table


def worth_showing(steps: "list[Step]") -> "list[Step]":
    """The last steps, and the first of those that differ from the record or that the guard marked."""
    rest = [step for step in steps[:-_LAST] if step.difference != 0 or not step.same_batch or _flags(step)]
    return rest[:_NOTED] + steps[-_LAST:]


def _flags(step: "Step") -> list[str]:
    return [flag for flag in ("nonfinite", "spike", "skipped") if step.values[f"train/{flag}"]]


def _rows_table(result: "Replay") -> "Table":
    from rich.table import Table

    table = Table(title=f"what step {result.steps[-1].step} read")
    named = any(row.source for row in result.rows)
    for title in ("sample", *(["source"] if named else []), "epoch", "row", "documents", "from"):
        table.add_column(title, justify="left" if title in ("source", "documents", "from") else "right")
    for row in result.rows:
        where = [str(row.sample), *([row.source] if named else []), str(row.epoch), str(row.row)]
        table.add_row(*where, ", ".join(map(str, row.documents)), ", ".join(row.origins))
    return table
