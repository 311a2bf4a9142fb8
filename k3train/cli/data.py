"""``k3train data``: prepare and look into token stores, list corpora, score the n-gram baseline."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

if TYPE_CHECKING:
    from k3train.data.config import DataConfig
    from k3train.data.stores import Stores
    from k3train.data.tokenizer import Tokenizer

_MOST = 2**62  # sample and row numbers are counted in 64 bits

HELP = "prepare and inspect token stores"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    prepare = _action(actions, "prepare", "make the token store of an experiment's data section")
    prepare.add_argument("--replace", action="store_true", help="make it anew even where there is one")
    inspect = _action(actions, "inspect", "show what a store holds and some of its rows")
    inspect.add_argument("--rows", type=int, default=2, metavar="N", help="rows to show (default 2)")
    inspect.add_argument(
        "--sample", type=int, default=0, metavar="K", help="first sample to show, in training order (default 0)"
    )
    inspect.add_argument(
        "--step", type=int, metavar="N", help="show rows of this step of the experiment, counted from 1, instead"
    )
    inspect.add_argument("--holdout", action="store_true", help="show held-out rows, in their order, instead")
    inspect.add_argument(
        "--sequence-length", type=int, metavar="S", help="row length (default: the experiment's, or 512)"
    )
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    stats = _action(actions, "stats", "counts, lengths of documents as bars, rows under each packing")
    stats.add_argument(
        "--sequence-length", type=int, metavar="S", help="row length (default: the experiment's, or 512)"
    )
    stats.add_argument("--longest", type=int, default=5, metavar="N", help="longest documents to name (default 5)")
    stats.add_argument("--json", action="store_true", help="one JSON object instead")
    ngram = _action(actions, "ngram", "held-out bits per byte of an n-gram baseline fitted on the training side")
    ngram.add_argument(
        "--order", type=int, default=3, metavar="N", help="symbols of a gram, the predicted one included"
    )
    dedup = _action(actions, "dedup", "list the duplicates among an experiment's sources, for prepare to leave out")
    dedup.add_argument("--out", type=Path, required=True, metavar="FILE", help="the list to write")
    dedup.add_argument(
        "--threshold", type=float, default=0.8, metavar="S", help="similarity of near duplicates (default 0.8)"
    )
    train = _action(actions, "train-tokenizer", "train a BPE tokenizer on an experiment's sources")
    train.add_argument("--vocab-size", type=int, required=True, metavar="N", help="ids in all, special ones included")
    train.add_argument("--out", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write")
    train.add_argument(
        "--most-bytes", type=int, default=1 << 30, metavar="B", help="text to learn from (default 1 GiB)"
    )
    for action in (ngram, dedup, train):
        action.add_argument("--source", metavar="NAME", help="which of data.sources, where there are several")
    train.add_argument(
        "--special-token", action="append", default=[], metavar="NAME", help="one more special token (repeatable)"
    )
    text = "list the named corpora"
    actions.add_parser("corpora", help=text, description=text)


def run(args: argparse.Namespace) -> int:
    """Carries out the action.

    Raises:
      UserError: bad input; see ``data/prepare.py`` and ``data/store.py``.
    """
    match args.action:
        case "prepare":
            _prepare(args)
        case "inspect":
            _inspect(args)
        case "stats":
            _stats(args)
        case "ngram":
            _ngram(args)
        case "dedup":
            _dedup(args)
        case "train-tokenizer":
            from k3train.data.train_tokenizer import train_tokenizer

            more = tuple(args.special_token)
            train_tokenizer(_one_source(args), args.vocab_size, args.out, args.most_bytes, more_specials=more)
        case _:
            _corpora()
    return 0


def _action(actions: "argparse._SubParsersAction", name: str, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text)
    takes_store = name in ("inspect", "stats", "ngram")
    what = "experiment file (YAML) or store folder" if takes_store else "experiment file (YAML)"
    action.add_argument("config", metavar="CONFIG|STORE" if takes_store else "CONFIG", help=what)
    action.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="values that go before the file's"
    )
    return action


def _data_config(args: argparse.Namespace) -> "DataConfig":
    from k3train.config.load import load
    from k3train.experiment import Experiment

    return load(args.config, args.overrides, Experiment).experiment.data


def _one_source(args: argparse.Namespace) -> "DataConfig":
    """The data section of one source: the only one, or the one of several that ``--source`` names.

    Raises:
      UserError: exit 2, the option is missing, or names none of them.
    """
    singles = _data_config(args).singles()
    name = args.source or ""
    if name not in singles:
        if "" in singles:
            raise UserError(f"--source {name}: the experiment has one source, without a name", ExitCode.USAGE)
        raise UserError(
            f"data.sources names several, and {args.action} takes one: give --source with one of {', '.join(singles)}",
            ExitCode.USAGE,
        )
    return singles[name]


def _prepare(args: argparse.Namespace) -> None:
    from k3train.data.prepare import naming, prepare
    from k3train.data.progress import ReadingBar
    from k3train.data.report import console, report, show_mixture
    from k3train.data.rows import plan_rows
    from k3train.data.store import open_store

    config, rows, out = _data_config(args), {}, console()
    for name, single in config.singles().items():
        with naming(name):
            if name and single.source is None:
                store = open_store(single.place)
            else:
                with ReadingBar() as bar:
                    store = prepare(single, replace=args.replace, say=bar.say, progress=bar.update)
            if name:
                out.rule(name)
            report(store, out)
            plan = plan_rows(store, config.packing, config.sequence_length, out.print)
            out.print(plan.summary)
            rows[name] = plan.rows
    show_mixture(config, rows, out)


def _inspect(args: argparse.Namespace) -> None:
    from k3train.data.report import console, report, show_rows

    _in_range(("--rows", args.rows, 0), ("--sample", args.sample, 0), ("--sequence-length", args.sequence_length, 1))
    _in_range(("--step", args.step, 1))
    stores, tokenizer, config = _open(args)
    out = console()
    for name, store in stores.by_name.items():
        if name:
            out.rule(name)
        if args.verify:
            store.verify()
            out.print("every checksum agrees")
        report(store, out)
    if args.sequence_length:
        config = config.model_copy(update={"sequence_length": args.sequence_length})
        _refuse_mixture(config)
    if args.step is not None and args.rows:
        _show_step(args, stores, tokenizer, config)
    elif args.rows:
        show_rows(stores, tokenizer, out, config, rows=args.rows, sample=args.sample, holdout=args.holdout)


def _show_step(args: argparse.Namespace, stores: "Stores", tokenizer: "Tokenizer | None", config: "DataConfig") -> None:
    """Print rows of ``--step``, and what steps the curriculum has.

    Raises:
      UserError: exit 2, other options do not go with it.
    """
    from k3train.config.load import load
    from k3train.data.course import Course
    from k3train.data.report import console, show_course, show_training_rows
    from k3train.experiment import Experiment

    if Path(args.config).is_dir() or args.holdout or args.sequence_length or args.sample:
        raise UserError(
            "--step takes an experiment file, and neither --sample nor --holdout nor --sequence-length", ExitCode.USAGE
        )
    train, out = load(args.config, args.overrides, Experiment).experiment.train, console()
    course = Course(train.stages(config.sequence_length))
    show_course(course, out)
    position, rows, length = course.rows_at(args.step - 1)
    _in_range((f"--step {args.step}, position", position, 0))
    show = {"position": position, "rows": min(rows, args.rows), "length": length}
    show_training_rows(stores, tokenizer, out, config, **show)


def _refuse_mixture(config: "DataConfig") -> None:
    """Raise UserError (exit 2) where the mixture does not go with another length of rows."""
    from k3train.data.mixture import mixture_of

    try:
        mixture_of(config, config.shuffle_seed)
    except ValueError as error:
        raise UserError(f"--sequence-length {config.sequence_length}: {error}", ExitCode.USAGE) from None


def _stats(args: argparse.Namespace) -> None:
    from k3train.data.report import console
    from k3train.data.stats import store_stats
    from k3train.data.stats_report import print_stats

    _in_range(("--longest", args.longest, 0), ("--sequence-length", args.sequence_length, 1))
    stores, _, config = _open(args)
    length, out = args.sequence_length or config.sequence_length, console()
    found = {name: store_stats(store, length, args.longest) for name, store in stores.by_name.items()}
    if args.json:
        every = {name: stats.as_json() for name, stats in found.items()}
        print(json.dumps(every.get("", every), indent=1))
        return
    for name, stats in found.items():
        if name:
            out.rule(name)
        print_stats(stats, out)


def _in_range(*options: tuple[str, int | None, int]) -> None:
    """Raise UserError where the value of an option is below the least one, or past what 64 bits count."""
    for option, value, least in options:
        if value is not None and not least <= value < _MOST:
            raise UserError(f"{option} {value}: give {least} or more, below 2**62", ExitCode.USAGE)


def _ngram(args: argparse.Namespace) -> None:
    from k3train.data.ngram import evaluate_ngram
    from k3train.data.prepare import ensure_store
    from k3train.data.tokenizer import load_tokenizer

    if Path(args.config).is_dir():
        stores, tokenizer, _ = _open(args)
        store = stores.only
    else:
        config = _one_source(args)
        store, tokenizer = ensure_store(config), load_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise UserError(
            f"{store.path}: a store of tokenizer {store.header.tokenizer.kind} needs the experiment file here"
        )
    result = evaluate_ngram(store, tokenizer, args.order)
    print(
        f"order-{result.order} byte n-gram (interpolated Kneser-Ney): {result.bits_per_byte:.4f} bits per byte "
        f"held out ({result.source_bytes} bytes, {result.supervised} symbols scored)"
    )


def _dedup(args: argparse.Namespace) -> None:
    from k3train.data.dedup import dedup
    from k3train.data.progress import ReadingBar

    with ReadingBar() as bar:
        found = dedup(_one_source(args), args.out, threshold=args.threshold, say=bar.say, progress=bar.update)
    share = found.duplicate_bytes / max(found.source_bytes, 1)
    key = f"data.sources.{args.source}.source.duplicates" if args.source else "data.source.duplicates"
    print(
        f"{args.out}: {found.exact:,} exact and {found.near:,} near duplicates among {found.documents:,} documents "
        f"({share:.2%} of their bytes); name it as {key}"
    )


def _open(args: argparse.Namespace) -> "tuple[Stores, Tokenizer | None, DataConfig]":
    """The stores of a folder or an experiment; no tokenizer where only a folder is given and it was not bytes."""
    from k3train.data.config import DataConfig
    from k3train.data.prepare import naming
    from k3train.data.store import open_store
    from k3train.data.stores import Stores
    from k3train.data.tokenizer import ByteTokenizer, load_tokenizer

    if Path(args.config).is_dir():
        if args.overrides:
            raise UserError(f"{args.config} is a store folder, which takes no overrides ({' '.join(args.overrides)})")
        store = open_store(args.config)
        config = DataConfig(store=args.config, sequence_length=512, shuffle_seed=store.header.shuffle_seed)
        return Stores({"": store}), ByteTokenizer() if store.header.tokenizer.kind == "bytes" else None, config
    config, stores = _data_config(args), {}
    tokenizer = load_tokenizer(config.tokenizer)
    for name, single in config.singles().items():
        with naming(name):
            stores[name] = open_store(single.place, tokenizer=tokenizer)
    return Stores(stores), tokenizer, config


def _corpora() -> None:
    from rich.table import Table

    from k3train.data.corpora import CORPORA
    from k3train.data.report import console

    table = Table("corpus", "version", "archive", "text", "licence", "source", box=None)
    for corpus in CORPORA.values():
        sizes = f"{corpus.archive_bytes / 1e6:.1f} MB", f"{corpus.text_bytes / 1e6:.1f} MB"
        table.add_row(corpus.name, corpus.version, *sizes, corpus.licence, corpus.about)
    console().print(table)
