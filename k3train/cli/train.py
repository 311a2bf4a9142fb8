"""``k3train train``: train, or go on with, the run of an experiment file."""

import argparse
import shlex
import time
from typing import TYPE_CHECKING

from k3train.config.errors import UserError

if TYPE_CHECKING:
    from k3train.experiment import Experiment

HELP = "train the model of an experiment file; goes on where its run folder left off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="experiment file (YAML)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the file's"
    )

    parser.add_argument(
        "--branch",
        metavar="NAME",
        help="go on from this run with changed keys, in a folder of its own, <run.dir>-NAME",
    )


def run(args: argparse.Namespace) -> int:
    """Checks the experiment before anything heavy is loaded, then trains.

    Raises:
      UserError: see ``train/loop.py``.
    """
    began = time.time()

    from k3train.run.signals import nothing_to_save

    with nothing_to_save():
        from k3train.config.load import load
        from k3train.experiment import Experiment

        exp = load(args.config, args.overrides, Experiment).experiment

        from k3train.parallel.joining import join
        from k3train.run.identity import DriftRefused
        from k3train.run.output import lasting_output
        from k3train.train.loop import train

    join(exp.run.peer_timeout_s)

    if args.branch is not None:
        exp = _branch(exp, args.branch)

    try:
        with lasting_output():
            return int(train(exp, began))
    except DriftRefused as refusal:
        if not refusal.branchable:
            raise
        words = ["k3train", "train", args.config, *args.overrides]
        words += [f"run.dir={exp.run.dir}"] if args.branch is not None else []
        command = f"{shlex.join(words)} --branch NAME"
        raise UserError(f"{refusal}\nTo branch off:\n  {command}", refusal.exit_code) from None


def _branch(exp: "Experiment", name: str) -> "Experiment":
    """``exp`` as the branch ``name``; process 0 looks what is there, and all believe it."""
    from k3train.parallel import coordination, distributed
    from k3train.run.branch import branched

    run = branched(exp, name).run if distributed.process_index() == 0 else exp.run
    return exp.model_copy(update={"run": type(run)(**coordination.broadcast(run.model_dump()))})
