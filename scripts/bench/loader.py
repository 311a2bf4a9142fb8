"""How fast training batches are read: tokens a second from a token store of random documents, by packing.

    python scripts/bench/loader.py FOLDER --gigabytes 1     # writes to, and deletes, a new folder in FOLDER

Documents have log-normal lengths, and the first quarter of each is masked, as a prompt is. Every id is checked against
the header and every batch is hashed. Prints, for each packing of one store and for a best-fit mixture of three that are
as large together (60, 30 and 10 % of the rows), the time to make the plans, tokens a second (median of the windows),
the most padding of a source, and this process's own memory.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from k3train.data.batch import batch_hash
from k3train.data.best_fit import BestFit
from k3train.data.config import DataConfig
from k3train.data.course import Course
from k3train.data.header import MASKED, SplitHeader
from k3train.data.loader import Loader
from k3train.data.pack import Chunks, RowPlan
from k3train.data.store import OFFSETS, Split, shard_name

VOCABULARY, SHARD_TOKENS = 65_000, 1 << 28
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def make_split(folder: Path, tokens: int, mean: float) -> Split:
    """A split of uint16 ids in documents of about ``mean`` tokens."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(np.log(mean) - 0.5, 1.0, int(1.2 * tokens / mean))).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = offsets[offsets <= tokens]
    total = int(offsets[-1])
    for i in track(range(-(-total // SHARD_TOKENS)), "writing tokens", transient=True):
        size = min(SHARD_TOKENS, total - i * SHARD_TOKENS)
        rng.integers(0, VOCABULARY, size, np.uint16).tofile(folder / shard_name(i))
    offsets.astype("<i8").tofile(folder / OFFSETS)
    prompts = np.stack([offsets[:-1], offsets[:-1] + np.diff(offsets) // 4], axis=1)
    prompts[prompts[:, 1] > prompts[:, 0]].astype("<i8").tofile(folder / MASKED)
    counts = SplitHeader(documents=len(offsets) - 1, tokens=total, source_bytes=0, min_id=0, max_id=VOCABULARY - 1)
    return Split(folder, counts, "<u2", SHARD_TOKENS)


def megabytes() -> float:
    """Resident memory that is this process's own; mapped tables belong to the system."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def section(folder: Path, names: list[str], sequence_length: int) -> DataConfig:
    """A data section of one store, or of several mixed by ``WEIGHTS``."""
    values: dict[str, object] = {"sequence_length": sequence_length}
    if len(names) == 1:
        return DataConfig.model_validate(values | {"store": str(folder / names[0])})
    sources = {name: {"store": str(folder / name)} for name in names}
    mixture = {"block": 1000, "phases": [{"tokens": 0, "weights": WEIGHTS}]}
    return DataConfig.model_validate(values | {"sources": sources, "mixture": mixture})


def measure(loader: Loader, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """(millions of tokens a second of each window, megabytes before the first and after the last)."""
    batch_hash(next(loader))
    start, rates = megabytes(), []
    for _ in track(range(args.windows), "reading", transient=True):
        began = time.perf_counter()
        for _ in range(args.window_batches):
            batch_hash(next(loader))
        tokens = args.window_batches * args.global_batch * args.sequence_length
        rates.append(tokens / (time.perf_counter() - began) / 1e6)
    return rates, [start, megabytes()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--mean-document", type=float, default=800.0, metavar="TOKENS")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--window-batches", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    table = Table("packing", "plan s", "rows", "padding", "M tokens/s", "least", "most", "MB", "at end")
    for column in table.columns[1:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        folder, tokens = Path(place), int(args.gigabytes * 5e8)
        one = {"one": make_split(folder / "one", tokens, args.mean_document)}
        three = {name: make_split(folder / name, tokens // len(WEIGHTS), args.mean_document) for name in WEIGHTS}
        cases = (("concat", Chunks, one), ("best_fit", BestFit, one), ("best_fit, 3 sources", BestFit, three))
        for title, packing, splits in cases:
            began = time.perf_counter()
            plans: dict[str, RowPlan] = {name: packing(split, args.sequence_length) for name, split in splits.items()}
            rows, planned = sum(plan.rows for plan in plans.values()), time.perf_counter() - began
            config = section(folder, list(splits), args.sequence_length)
            course = Course.steady(args.global_batch, args.sequence_length)
            loader = Loader(plans if len(plans) > 1 else plans["one"], config, course, seed=0)
            rates, memory = measure(loader, args)
            loader.close()
            padding = max(plan.padding if isinstance(plan, BestFit) else 0.0 for plan in plans.values())
            table.add_row(title, f"{planned:.2f}", f"{rows:,}", f"{padding:.2%}", f"{statistics.median(rates):.1f}",
                          f"{min(rates):.1f}", f"{max(rates):.1f}", *(f"{size:.0f}" for size in memory))  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, mapped tables included")


if __name__ == "__main__":
    main()
