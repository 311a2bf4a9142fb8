"""Where the time of a profiled run goes: device time by part of the model, forward and backward.

    python scripts/bench/profile_table.py RUN            # a run trained with metrics.profile_steps=[a, b]
    python scripts/bench/profile_table.py trace.json.gz --top 20

For a GPU, profile with XLA_FLAGS=--xla_gpu_enable_command_buffer= so that kernels keep the names of their operations.
"""

import argparse
import collections
import gzip
import json
import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

# First match names the part; the named scopes are those of k3train/models/block.py and the names of jitted functions.
PARTS = (
    ("KDA", r"[(/]kda\b"),
    ("MLA", r"[(/]mla\b"),
    ("feed-forward, experts", r"[(/]ffn\b"),
    ("Newton-Schulz", r"^jit\(step\)/while"),
    ("layers: norms, depth mix, glue", r"while/body"),
    ("loss, embedding, optimizer", r"jit\(step\)"),
)


def kernels(path: Path) -> list[tuple[str, str, float]]:
    """(operation, kernel, microseconds) of every kernel on the device's streams."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    streams = {
        (e["pid"], e["tid"]) for e in events if e.get("name") == "thread_name" and "Stream" in e["args"].get("name", "")
    }
    return [
        (e["args"].get("name") or e["args"].get("tf_op", ""), e["name"], e["dur"])
        for e in events
        if e.get("ph") == "X" and (e["pid"], e.get("tid")) in streams and "hlo_op" in e.get("args", {})
    ]


def part(operation: str) -> str:
    """The part of the model that an operation belongs to."""
    for name, pattern in PARTS:
        if re.search(pattern, operation):
            return name
    return "no operation name (copies, fused constants)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="run folder or trace.json.gz")
    parser.add_argument("--top", type=int, default=0, help="also list so many kernels")
    args = parser.parse_args()
    path = args.path
    if path.is_dir():
        found = sorted(path.glob("profile/plugins/profile/*/*.trace.json.gz"))
        if not found:
            raise SystemExit(f"{path} holds no profile; train with 'metrics.profile_steps=[a, b]'")
        path = found[-1]
    times = collections.defaultdict(lambda: [0.0, 0.0])
    each, total = collections.defaultdict(float), 0.0
    for operation, kernel, duration in kernels(path):
        recomputed = "rematted_computation" in operation
        times[part(operation)]["transpose(" in operation and not recomputed] += duration
        each[kernel] += duration
        total += duration
    table = Table(title=f"device time, {total / 1e3:.0f} ms in all")
    for column in ("part", "forward (+ recomputed) ms", "backward ms", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, (forward, backward) in sorted(times.items(), key=lambda item: -sum(item[1])):
        share = f"{(forward + backward) / total:.1%}"
        table.add_row(name, f"{forward / 1e3:.1f}", f"{backward / 1e3:.1f}", share)
    console = Console()
    console.print(table)
    for kernel, duration in sorted(each.items(), key=lambda item: -item[1])[: args.top]:
        console.print(f"{duration / 1e3:9.2f} ms  {duration / total:5.1%}  {kernel}", markup=False)


if __name__ == "__main__":
    main()
