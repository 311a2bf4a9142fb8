"""The command line: finds the command, imports only its module, and turns errors into exit codes."""

import argparse
import difflib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

from k3train import __version__
from k3train.config.errors import UserError
from k3train.config.exit_codes import INTERRUPTED, ExitCode

COMMANDS = {
    "train": "train the model an experiment file describes, or go on with it",
    "evaluate": "held-out loss of a run's checkpoint",
    "generate": "let a run's checkpoint write text",
    "replay": "run a step of a past run again and say whether it repeats",
    "ckpt": "list, verify, prune, compare and keep a run's checkpoints",
    "data": "prepare and inspect token stores",
    "config": "show, check or describe experiment files",
    "test": "what CI runs: lint, format, types, tests",
}
_heard: list[int] = []


def entry() -> None:
    """The ``k3train`` program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Text that the terminal's encoding lacks is escaped, and ends no command.
            stream.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    code = main()
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once more, on the way out, would end in a traceback
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns the exit code (``config/exit_codes.py``)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        module, args = _parse(argv)
        code = int(module.run(args))
        sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse: 0 after --help, 2 after a usage error
        return end.code if isinstance(end.code, int) else int(ExitCode.BUG)
    except UserError as error:
        print(f"k3train: error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("k3train: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) left: nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FINISHED)
    except Exception:
        if _heard:
            print("k3train: interrupted", file=sys.stderr)
            return INTERRUPTED
        traceback.print_exc()
        return int(ExitCode.BUG)


def _interrupt(number: int, frame: object) -> None:
    """Ctrl-C, as Python has it, but written down: jaxlib, interrupted in its import, drops it for ImportError."""
    _heard.append(number)
    raise KeyboardInterrupt


def _parse(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    if not argv or argv[0].startswith("-"):
        top = _top_parser()
        top.parse_args(argv)
        top.print_usage(sys.stderr)
        raise SystemExit(ExitCode.USAGE)
    name, *rest = argv
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        _top_parser().error(
            f"no command {name!r}" + (f"; did you mean {near[0]}?" if near else f"; there are {', '.join(COMMANDS)}")
        )
    module = _module(name)
    parser = argparse.ArgumentParser(
        prog=f"k3train {name}", description=f"{COMMANDS[name][0].upper()}{COMMANDS[name][1:]}."
    )
    module.add_arguments(parser)
    # argparse fills a list of words only once; overrides may also stand behind an option.
    args, left = parser.parse_known_args(rest)
    late = [word for word in left if "=" in word and not word.startswith("-")]
    if len(late) < len(left) or (late and not hasattr(args, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return module, args


def _top_parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    top = argparse.ArgumentParser(
        prog="k3train",
        usage="k3train COMMAND ...",
        description="Pretrain models of the Kimi K3 family in JAX.",
        epilog=f"commands:\n{listing}\n\n`k3train COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"k3train {__version__}")
    return top


def _module(name: str) -> ModuleType:
    """The command's module; imported here and not above, so that ``--help`` costs no JAX."""
    match name:
        case "train":
            from k3train.cli import train as module
        case "evaluate":
            from k3train.cli import evaluate as module
        case "generate":
            from k3train.cli import generate as module
        case "replay":
            from k3train.cli import replay as module
        case "ckpt":
            from k3train.cli import ckpt as module
        case "data":
            from k3train.cli import data as module
        case "config":
            from k3train.cli import config as module
        case _:
            from k3train.cli import test as module
    return module
