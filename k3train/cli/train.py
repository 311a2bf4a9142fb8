"""``k3train train``: train, or go on with, the run of an experiment file."""

import argparse

HELP = "train the model of an experiment file; goes on where its run folder left off"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("config", metavar="CONFIG", help="experiment file (YAML)")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the file's"
    )


def run(args: argparse.Namespace) -> int:
    """Checks the experiment before anything heavy is loaded, then trains.

    Raises:
      UserError: see ``train/loop.py``.
    """
    from k3train.config.load import load
    from k3train.experiment import Experiment

    exp = load(args.config, args.overrides, Experiment).experiment

    from k3train.parallel import distributed

    distributed.initialize()

    from k3train.train.loop import train

    return int(train(exp))
