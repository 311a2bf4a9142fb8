"""How fast training batches are read: tokens a second from a token store of random documents, by packing.

    python scripts/bench/loader.py FOLDER --gigabytes 1     # writes to, and deletes, a new folder in FOLDER

Documents have log-normal lengths. Every id is checked against the header and every batch is hashed. Prints, for each
packing, the time to make the plan, tokens a second (median of the windows), padding, and this process's own memory.
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
from k3train.data.header import SplitHeader
from k3train.data.loader import Loader
from k3train.data.pack import Chunks
from k3train.data.store import OFFSETS, Split, shard_name

VOCABULARY, SHARD_TOKENS = 65_000, 1 << 28


def make_split(folder: Path, tokens: int, mean: float) -> Split:
    """A split of uint16 ids in documents of about ``mean`` tokens."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(np.log(mean) - 0.5, 1.0, int(1.2 * tokens / mean))).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    offsets = offsets[offsets <= tokens]
    total = int(offsets[-1])
    for i in track(range(-(-total // SHARD_TOKENS)), "writing tokens", transient=True):
        size = min(SHARD_TOKENS, total - i * SHARD_TOKENS)
        rng.integers(0, VOCABULARY, size, np.uint16).tofile(folder / shard_name(i))
    offsets.astype("<i8").tofile(folder / OFFSETS)
    counts = SplitHeader(documents=len(offsets) - 1, tokens=total, source_bytes=0, min_id=0, max_id=VOCABULARY - 1)
    return Split(folder, counts, "<u2", SHARD_TOKENS)


def megabytes() -> float:
    """Resident memory that is this process's own; the mapped tokens belong to the system."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--mean-document", type=float, default=800.0, metavar="TOKENS")
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--window-batches", type=int, default=50)
    args = parser.parse_args()
    table = Table("packing", "plan s", "rows", "padding", "M tokens/s", "least", "most", "MB", "at end")
    for column in table.columns[1:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        split = make_split(Path(folder), int(args.gigabytes * 5e8), args.mean_document)
        for packing in (Chunks, BestFit):
            began = time.perf_counter()
            plan = packing(split, args.sequence_length)
            rows, planned = plan.rows, time.perf_counter() - began
            config = DataConfig(store=folder, sequence_length=args.sequence_length)
            loader = Loader(plan, config, Course.steady(args.global_batch, args.sequence_length), seed=0)
            batch_hash(next(loader))
            start, rates = megabytes(), []
            for _ in track(range(args.windows), f"reading {packing.__name__}", transient=True):
                began = time.perf_counter()
                for _ in range(args.window_batches):
                    batch_hash(next(loader))
                tokens = args.window_batches * args.global_batch * args.sequence_length
                rates.append(tokens / (time.perf_counter() - began) / 1e6)
            end = megabytes()
            loader.close()
            padding = f"{plan.padding:.2%}" if isinstance(plan, BestFit) else "none"
            table.add_row(packing.__name__, f"{planned:.2f}", f"{rows:,}", padding, f"{statistics.median(rates):.1f}",
                          f"{min(rates):.1f}", f"{max(rates):.1f}", f"{start:.0f}", f"{end:.0f}")  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"peak resident {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB, mapped tokens included")


if __name__ == "__main__":
    main()
