"""``k3train evaluate``: held-out loss of a run's checkpoint."""

import argparse
import json

HELP = "score a run's checkpoint on its held-out documents"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run folder, or RUN@STEP (default: the newest step)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the run's own"
    )
    parser.add_argument("--ema", action="store_true", help="score the averaged weights (optim.ema)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Loads the weights and scores them.

    Raises:
      UserError: no such run or checkpoint, or its data is gone.
    """
    import sys

    from rich.console import Console
    from rich.progress import Progress

    from k3train.train.evaluate import Evaluator
    from k3train.train.load import load_run, open_run_data

    console = Console(file=sys.stderr, highlight=False)
    loaded = load_run(args.run, args.overrides, ema=args.ema, say=lambda text: console.print(text, markup=False))
    evaluator = Evaluator(loaded.parts, open_run_data(loaded, lambda text: console.print(text, markup=False)))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("scoring held-out rows")
        score = evaluator(
            loaded.params, loaded.buffers, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if args.json:
        print(json.dumps({"run": args.run, "step": loaded.step} | score.as_json()))
    else:
        print(
            f"{args.run} step {loaded.step}: loss {score.loss:.4f} nats/token, {score.bits_per_byte:.4f} bits/byte "
            f"over {score.tokens:,} tokens"
        )
        for name, one in score.sources.items():
            loss, bits = f"{one.loss:.4f} nats/token", f"{one.bits_per_byte:.4f} bits/byte"
            print(f"  {name}: loss {loss}, {bits} over {one.tokens:,} tokens")
    return 0
