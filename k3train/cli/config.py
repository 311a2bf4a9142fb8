"""``k3train config``: show an experiment with the provenance of every value, check it, print its schema."""

import argparse
import json
import sys

HELP = "show, check or describe experiment files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("show", "print every value and where it was written"),
        ("validate", "check, and say nothing more"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("file", help="experiment file (YAML)")
        action.add_argument(
            "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the file's"
        )
    schema = actions.add_parser("schema", help="print the JSON Schema for editors", description="print the JSON Schema")
    schema.add_argument("--markdown", action="store_true", help="print the page of every key instead (docs/config.md)")


def run(args: argparse.Namespace) -> int:
    """Carries out the action.

    Raises:
      UserError: where the experiment is not valid.
    """
    from k3train.config.load import load
    from k3train.config.reference import markdown
    from k3train.config.schema import json_schema
    from k3train.experiment import Experiment

    if args.action == "schema":
        print(markdown(Experiment) if args.markdown else json.dumps(json_schema(Experiment), indent=2))
        return 0
    experiment, provenance = load(args.file, args.overrides, Experiment)
    if args.action == "validate":
        print(f"{args.file}: valid")
        return 0
    _show(experiment.model_dump(), provenance)
    return 0


def _show(values: dict, provenance: dict[str, str]) -> None:
    from k3train.config.show import aligned, lines

    colour = sys.stdout.isatty()
    for text, origin in aligned(lines(values, provenance)):
        comment = f"  # {origin}" if origin else ""
        print(text + (f"\033[2m{comment}\033[0m" if colour and comment else comment))
