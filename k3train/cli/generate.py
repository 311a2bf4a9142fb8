"""``k3train generate``: text from a run's checkpoint."""

import argparse
import math
import sys
from itertools import chain

HELP = "let a run's checkpoint continue a prompt"
MOST_TOKENS = 1 << 20
"""Tokens to write at most: memory for all of them is taken before the first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    parser.add_argument("run", metavar="RUN", help="run folder, or RUN@STEP (default: the newest step)")
    parser.add_argument("prompt", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="tokens to write at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="probability mass drawn from (default 0.95)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights (optim.ema)")


def run(args: argparse.Namespace) -> int:
    """Loads the weights and streams the continuation to standard output.

    Raises:
      UserError: no such run or checkpoint, or an option out of range.
    """
    from k3train.config.errors import UserError
    from k3train.config.exit_codes import ExitCode

    for name, ok, range_ in (
        ("--tokens", 0 < args.tokens <= MOST_TOKENS, f"from 1 to {MOST_TOKENS:,}"),
        ("--seed", 0 <= args.seed < 2**63, "from 0 to 2**63 - 1"),
        ("--temperature", 0 <= args.temperature < math.inf, "0 or more"),
        ("--top-p", 0 < args.top_p <= 1, "in (0, 1]"),
    ):
        if not ok:
            raise UserError(f"{name} must be {range_}", ExitCode.USAGE)

    from rich.console import Console

    from k3train.infer.generate import Generator
    from k3train.train.load import load_run

    console = Console(stderr=True, highlight=False)
    with console.status("loading, then compiling"):  # shows on a terminal only
        loaded = load_run(args.run, [], ema=args.ema, say=lambda text: console.print(text, markup=False))
        parts = loaded.parts
        generator = Generator(parts.decoder, parts.tokenizer, parts.compute_dtype, add_bos=parts.exp.data.add_bos)
        ids = generator.stream(
            loaded.params,
            loaded.buffers,
            args.prompt,
            tokens=args.tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
        )
        pieces = generator.pieces(ids)
        first = next(pieces, "")
    sys.stdout.write(args.prompt)
    for piece in chain((first,), pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return 0
