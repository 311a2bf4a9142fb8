"""``k3train ckpt``: list, verify, prune, compare and keep a run's checkpoints."""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from etils.epath import Path

    from k3train.checkpoint.layout import Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions and their arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = _action(actions, "list", "show every checkpoint of a run, and what is none")
    verify = _action(actions, "verify", "compare the files with their checksums; exit code 31 if anything is bad")
    verify.add_argument("step", metavar="STEP", type=int, nargs="?", help="step to verify (default: the newest)")
    verify.add_argument("--all", action="store_true", help="verify every checkpoint, those set aside included")
    prune = _action(actions, "prune", "delete what the run's checkpoint section no longer wants")
    prune.add_argument("--keep", type=int, metavar="N", help="newest checkpoints that stay (default: the run's own)")
    prune.add_argument(
        "--set-aside", action="store_true", help="delete what is quarantined or retired too, and leftovers of saves"
    )
    prune.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    keep = _action(actions, "keep", "let a checkpoint stay for good")
    keep.add_argument("step", metavar="STEP", type=int)
    keep.add_argument("--undo", action="store_true", help="let the run's policy decide again")
    text = "compare config, arrays and values of two checkpoints"
    diff = actions.add_parser("diff", help=text, description=text)
    diff.add_argument("a", metavar="RUN@A")
    diff.add_argument("b", metavar="RUN@B")
    diff.add_argument(
        "--values", action="store_true", help="read the arrays that differ and say how far apart they are"
    )
    for action in (listing, verify, prune, diff):
        action.add_argument("--json", action="store_true", help="print one JSON value")


def _action(actions: "argparse._SubParsersAction", name: str, text: str) -> argparse.ArgumentParser:
    action = actions.add_parser(name, help=text, description=text)
    action.add_argument("run", metavar="RUN", help="run folder")
    return action


def run(args: argparse.Namespace) -> int:
    """Carries out the action.

    Raises:
      UserError: exit 31 where there is no such checkpoint, 33 where a trainer uses the run that is to be pruned.
    """
    from k3train.run.output import lasting_output

    match args.action:
        case "list":
            return _list(args)
        case "verify":
            with lasting_output():  # the verdict holds, and what is begun is done, whether or not anybody reads on
                return _verify(args)
        case "prune":
            with lasting_output():
                return _prune(args)
        case "keep":
            return _keep(args)
        case _:
            return _diff(args)


def _list(args: argparse.Namespace) -> int:
    from rich.table import Column, Table

    from k3train.checkpoint.inspect import age, directory_of, rows

    found = rows(directory_of(args.run))
    if args.json:
        print(json.dumps([row._asdict() for row in found]))
        return 0
    state = Column("state", no_wrap=True)  # half a hash compares nothing
    table = Table("step", "kind", "age", "size", "tokens", "eval", state, "status", box=None, pad_edge=False)
    for row in found:
        tokens = "" if row.tokens is None else f"{row.tokens:,}"
        score = "" if row.eval is None else f"{row.eval:.4f}"
        status = f"{row.status}: {row.reason}" if row.reason else row.status
        table.add_row(row.folder, row.kind, age(row.saved), _size(row.size), tokens, score, row.state_hash, status)
    _console().print(table if found else f"{args.run}: no checkpoints")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    from k3train.checkpoint.inspect import directory_of
    from k3train.checkpoint.layout import complete, scan
    from k3train.checkpoint.manifest import MANIFEST

    directory = directory_of(args.run)
    entries = [entry for entry in scan(directory) if entry.status not in ("unfinished", "foreign")]
    if not args.all:
        wanted = max(complete(entries), default=None) if args.step is None else args.step
        entries = [entry for entry in entries if entry.step == wanted][-1:]
        if not entries:
            there = ", ".join(entry.path.name for entry in scan(directory)) or "none"
            of = "" if args.step is None else f" of step {args.step}"
            raise CheckpointRefused(f"{directory}: no checkpoint{of}; there: {there}")
    total = sum(file["size"] for entry in entries for file in entry.manifest.get("files", {}).values())
    results = []
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = _console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verifying", total=total)
        for entry in entries:
            faults = _faults(entry, lambda size: bar.advance(task, size))
            if not (faults and entry.manifest and not (entry.path / MANIFEST).exists()):  # deleted meanwhile, else
                results.append((entry, faults))
    if args.json:
        print(
            json.dumps(
                [
                    {"folder": entry.path.name, "step": entry.step, "status": entry.status, "faults": faults}
                    for entry, faults in results
                ]
            )
        )
    for entry, faults in () if args.json else results:
        aside = "" if entry.status in ("complete", "damaged") else f" ({entry.status}: {entry.reason})"
        print(f"{entry.path.name}: {'; '.join(faults) if faults else 'every file is as written'}{aside}")
    bad = any(faults for entry, faults in results if entry.status in ("complete", "damaged"))
    return int(ExitCode.CHECKPOINT if bad else ExitCode.FINISHED)


def _faults(entry: "Entry", advance: "Callable[[int], Any]") -> list[str]:
    """What is wrong with a checkpoint's files."""
    from k3train.checkpoint.manifest import read_manifest, verify_share

    try:
        return verify_share(entry.path, read_manifest(entry.path), advance=advance)
    except (OSError, ValueError) as error:
        return [str(error)]


def _prune(args: argparse.Namespace) -> int:
    from k3train.checkpoint.inspect import directory_of
    from k3train.checkpoint.layout import clear, complete, remove, scan
    from k3train.checkpoint.policies import kept, surplus

    if args.keep is not None and args.keep < 1:
        raise UserError(f"--keep {args.keep}: at least one checkpoint must stay", ExitCode.USAGE)
    directory = directory_of(args.run)
    with _undisturbed(directory):
        entries = scan(directory)
        good = complete(entries)
        gone = [good[step].path for step in surplus(kept(good.values()), _policy(good, args.keep))]
        if gone:
            _refuse_without_a_good_one([good[step] for step in good if good[step].path not in gone])
        if args.set_aside:
            gone += [entry.path for entry in entries if entry.status in ("quarantined", "retired")]
        if args.json:
            print(json.dumps([path.name for path in gone]))
        for path in gone:
            if not args.json:
                print(f"{'would delete' if args.dry_run else 'deleting'} {path}")
            if not args.dry_run:
                remove(path)
        if args.set_aside and not args.dry_run:
            clear(directory, scan(directory), (), (lambda _: None) if args.json else print)
    if not gone and not args.json:
        print(f"{directory}: nothing to delete")
    return 0


def _policy(good: "dict[int, Entry]", keep: int | None) -> CheckpointConfig:
    """What the run wanted kept when it last saved."""
    section: Any = {}
    if good:
        section = good[max(good)].manifest["meta"].get("config", {}).get("checkpoint", {})
    return CheckpointConfig.model_validate(section if keep is None else {**section, "keep": keep})


def _refuse_without_a_good_one(staying: "list[Entry]") -> None:
    """Before anything is deleted, one of those that stay must be whole."""
    for entry in reversed(staying):
        faults = _faults(entry, lambda _: None)
        if not faults:
            return
        print(f"WARNING: {entry.path} is damaged: {faults[0]}")
    raise CheckpointRefused("none of the checkpoints that would stay is whole; nothing was deleted")


@contextmanager
def _undisturbed(directory: "Path") -> Iterator[None]:
    """No trainer uses the run meanwhile."""
    from k3train.checkpoint.layout import FOLDER
    from k3train.config.object_store import in_object_store
    from k3train.run.directory import LOCK
    from k3train.run.lease import Lease
    from k3train.run.lock import RunLock

    def lost(message: str) -> None:
        print(f"k3train: error: {message}", file=sys.stderr, flush=True)
        os._exit(ExitCode.RUN_FOLDER)

    if directory.name != FOLDER:  # checkpoints by themselves, without a run
        yield
        return
    run = directory.parent
    lock = Lease(str(run), note=print, lost=lost) if in_object_store(run) else RunLock(pathlib.Path(run) / LOCK)
    try:
        yield
    finally:
        lock.release()


def _keep(args: argparse.Namespace) -> int:
    from k3train.checkpoint.inspect import find
    from k3train.checkpoint.layout import mark
    from k3train.checkpoint.manifest import KEEP

    entry = find(f"{args.run}@{args.step}")
    if args.undo:
        (entry.path / KEEP).unlink(missing_ok=True)
    else:
        mark(entry.path, KEEP, "k3train ckpt keep")
    print(f"{entry.path}: {'the policy decides again' if args.undo else 'stays for good'}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from rich.progress import track
    from rich.table import Column, Table

    from k3train.checkpoint.inspect import compare, distances, find

    a, b = find(args.a), find(args.b)
    found = compare(a.manifest, b.manifest)
    for entry in (a, b) if args.values else ():
        if faults := _faults(entry, lambda _: None):
            raise CheckpointRefused(f"{entry.path} is damaged, so its values say nothing: {faults[0]}")
    notes, far = _console(stderr=True), []
    if args.values:
        values, quiet = distances(a, b, found.changed), not notes.is_terminal
        shown = track(values, "reading arrays", len(found.changed), console=notes, transient=True, disable=quiet)
        far = list(shown)
    if args.json:
        print(json.dumps(found._asdict() | {"values": [distance._asdict() for distance in far]}))
        return 0
    out = _console()
    if found.config:
        table = Table(*(Column(title, overflow="fold") for title in ("key", args.a, args.b)), box=None)
        for key, pair in found.config.items():
            table.add_row(key, *map(json.dumps, pair))
        out.print(table)
    for name, where in (*((n, args.a) for n in found.only_a), *((n, args.b) for n in found.only_b)):
        out.print(f"{name}: only in {where}")
    for name, (first, second) in found.reshaped.items():
        out.print(f"{name}: {first[0]} {first[1]}, {second[0]} {second[1]}")
    if far:
        table = Table(Column("array", overflow="fold", no_wrap=True), "largest difference", "relative norm", box=None)
        for distance in far:
            table.add_row(distance.name, f"{distance.max_abs:.3g}", f"{distance.relative:.3g}")
        out.print(table)
    for name in () if far else found.changed:
        out.print(f"{name}: other values")
    out.print(f"{len(found.equal)} arrays equal, {len(found.changed)} with other values")
    return 0


def _size(count: int) -> str:
    """``1.2 GiB``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def _console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True, markup=False)
