"""Times the routed experts of one layer over all devices: whole, and piece by piece, at several skews and transports.

    python scripts/bench/moonep.py                                       # sizes of a small K3 on all devices
    python scripts/bench/moonep.py --width 3584 --inner 3072 --tokens 8192 --dtype bfloat16 --transport padded ragged
    python scripts/bench/moonep.py --json moonep.json

MaxVio is the fullest expert's tokens over the mean, less one; choices are drawn to reach it. ``on rank 0`` places the
experts by popularity, so that all hot ones live on one rank. Pieces are those of the first round, compiled
apart, each with the integer work it needs. Bytes are those that leave the rank that sends most, in one direction;
the link's rate is measured by a ``ppermute`` to the next rank.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from k3train.parallel.moonep import travel
from k3train.parallel.moonep.compute import Experts
from k3train.parallel.moonep.config import Options, default_capacity, weigh
from k3train.parallel.moonep.layout import lay, sizes_of
from k3train.parallel.moonep.plan import plan
from k3train.parallel.moonep.report import render
from k3train.parallel.moonep.routed import Routed, routed
from k3train.parallel.moonep.transports import wire

AXIS = "expert"
PIECES = ("planner", "prefetch", "dispatch", "matmul", "combine", "matmul back", "combine back", "gradient return")
WHOLE = ("forward", "forward + backward")


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU, wide; SiTU's cost differs by two tanh."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)


def choices(tokens: int, top_k: int, experts: int, maxvio: float, by_popularity: bool) -> np.ndarray:
    """[tokens, k] int32 distinct experts whose loads reach ``maxvio`` as nearly as these sizes allow."""
    rng = np.random.default_rng(0)
    liking = np.sort(rng.normal(size=experts))[::-1] if by_popularity else rng.normal(size=experts)
    noise = rng.gumbel(size=(tokens, experts)).astype(np.float32)
    sample = noise[: max(2048, 64 * experts // top_k)]

    def draw(scale: float, noise: np.ndarray) -> np.ndarray:
        return np.argpartition(-(noise + (scale * liking).astype(np.float32)), top_k - 1, axis=1)[:, :top_k]

    low, high = 0.0, 50.0
    for _ in range(18):
        scale = (low + high) / 2
        low, high = (scale, high) if violation(draw(scale, sample), experts) < maxvio else (low, scale)
    return draw((low + high) / 2, noise).astype(np.int32)


def violation(ids: np.ndarray, experts: int) -> float:
    """MaxVio of choices."""
    return float(np.bincount(ids.ravel(), minlength=experts).max() * experts / ids.size - 1)


class Bench:
    """One transport's compiled pieces and whole, on one mesh and one set of sizes."""

    def __init__(self, args: argparse.Namespace, mesh: jax.sharding.Mesh, transport: str):
        self.args, self.mesh, self.transport = args, mesh, transport
        self.ranks = mesh.size
        self.dtype = jnp.dtype(args.dtype)
        self.options = Options(transport, args.slots, args.capacity)  # type: ignore[arg-type]
        self.run = {name: self._mapped(getattr(self, "_" + name.replace(" ", "_"))) for name in PIECES}
        self.run |= {"forward": self._mapped(self._whole), "forward + backward": jax.jit(self._step)}
        self.stats = self._mapped(self._stats)
        self._planned: float | None = None

    def _mapped(self, function: Callable) -> Callable:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
        return jax.jit(mapped)

    def _layer(self, ids: jax.Array) -> Routed:
        sizes = sizes_of(AXIS, ids, self.args.experts // self.ranks, self.args.slots, self.args.block)
        experts = Experts(activation, self.args.implementation)
        return Routed(sizes, experts, self.options.transport, self.options.capacity)  # type: ignore[arg-type]

    def _wire(self, layer: Routed, layout):
        return wire(layer.transport, layout, layer.sizes, layer.capacity)

    # Pieces, in order; each takes what the ones before it made. All arrays are split along their first axis.

    def _planner(self, ids):
        made = plan(ids, self.args.experts, AXIS)
        return made, lay(made, self._layer(ids).sizes, 0)

    def _prefetch(self, ids, matrices, made, layout):
        return self._layer(ids).held(matrices, made, layout, 0, self.dtype)

    def _dispatch(self, ids, z, weights, layout):
        layer = self._layer(ids)
        return travel.deliver(self._wire(layer, layout), layout, layer.sizes, (z,), weights)

    def _matmul(self, ids, rows, held, layout):
        return self._layer(ids).experts.forward(rows, held, layout)

    def _combine(self, ids, out, weight, first, layout):
        layer = self._layer(ids)
        return travel.collect(self._wire(layer, layout), layout, layer.sizes, first, out, scale=weight)[0]

    def _matmul_back(self, ids, rows, d_out, weight, held, layout):
        return self._layer(ids).experts.backward(rows, d_out, weight, held, layout)

    def _combine_back(self, ids, d_rows, d_weight, first, layout):
        layer = self._layer(ids)
        return travel.collect(self._wire(layer, layout), layout, layer.sizes, first, d_rows, each=d_weight)

    def _gradient_return(self, ids, d_held, made, layout):
        return tuple(self._layer(ids).homed(d, made, layout, 0) for d in d_held)

    def _whole(self, ids, z, weights, matrices):
        return routed(
            z, ids, weights, matrices, axis=AXIS, activation=activation, options=self.options,
            implementation=self.args.implementation, block=self.args.block,
        )[0]  # fmt: skip

    def _step(self, ids, z, weights, matrices, dy):
        def loss(z, weights, matrices):
            return jnp.sum(self.run["forward"](ids, z, weights, matrices) * dy)

        return jax.grad(loss, argnums=(0, 1, 2))(z, weights, matrices)

    def _stats(self, ids, z, weights, matrices):
        stats = routed(
            z, ids, weights, matrices, axis=AXIS, activation=activation, options=self.options,
            implementation=self.args.implementation, block=self.args.block,
        )[1]  # fmt: skip
        layout = lay(plan(ids, self.args.experts, AXIS), self._layer(ids).sizes, 0)
        stats["phases"] = jnp.asarray(self._wire(self._layer(ids), layout).phases)
        return jax.tree.map(lambda a: a[None], stats)

    def planned_mib(self, inputs: tuple) -> float:
        """MiB that XLA allots on a device for forward + backward, besides arguments; the same at every skew."""
        if self._planned is None:
            memory = self.run["forward + backward"].lower(*inputs).compile().memory_analysis()
            self._planned = float("nan") if memory is None else memory.temp_size_in_bytes / 2**20
        return self._planned

    def times(self, arrays: tuple, repeats: int) -> dict[str, float]:
        """Median milliseconds of every piece and of the whole."""
        ids, z, weights, matrices, dy = arrays
        ms: dict[str, float] = {}

        def timed(name: str, *inputs: Any) -> Any:
            ms[name], out = median_ms(self.run[name], (ids, *inputs), repeats)
            return out

        made, layout = timed("planner")
        held = timed("prefetch", matrices, made, layout)
        (rows,), weight, first = timed("dispatch", z, weights, layout)
        out = timed("matmul", rows, held, layout)
        timed("combine", out, weight, first, layout)
        d_rows, d_weight, d_held = timed("matmul back", rows, out, weight, held, layout)
        timed("combine back", d_rows, d_weight, first, layout)
        timed("gradient return", d_held, made, layout)
        del held, rows, out, d_rows, d_held
        timed("forward", z, weights, matrices)
        timed("forward + backward", z, weights, matrices, dy)
        return ms


def median_ms(function: Callable, inputs: tuple, repeats: int) -> tuple[float, Any]:
    """(median milliseconds, the result), the first call left out."""
    out = jax.block_until_ready(function(*inputs))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        times.append(1e3 * (time.perf_counter() - began))
    return float(np.median(times)), out


def arrays(args: argparse.Namespace, mesh: jax.sharding.Mesh, ids: np.ndarray) -> tuple:
    """ids, z, weights, matrices, dy on the mesh."""
    sharding, tokens = NamedSharding(mesh, P(AXIS)), len(ids)

    def draw(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
        make = jax.jit(lambda key: jax.random.normal(key, shape, dtype), out_shardings=sharding)
        return make(jax.random.key(seed))

    experts, width, inner = args.experts, args.width, args.inner
    matrices = tuple(draw(i, *s, dtype=args.dtype) for i, s in enumerate([(experts, width, inner)] * 2 + [
        (experts, inner, width)]))  # fmt: skip
    z, weights = draw(3, tokens, width, dtype=args.dtype), jnp.abs(draw(4, tokens, args.top_k))
    return jax.device_put(ids, sharding), z, weights, matrices, draw(5, tokens, width)


def link_rate(mesh: jax.sharding.Mesh, megabytes: int, repeats: int) -> float:
    """GB/s that leave a device in a ``ppermute`` to the next."""
    ranks, elements = mesh.size, megabytes * 2**20 // 4
    if ranks == 1:
        return float("nan")
    pairs = [(r, (r + 1) % ranks) for r in range(ranks)]
    moved = jax.shard_map(
        lambda x: jax.lax.ppermute(x, AXIS, pairs), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    x = jax.device_put(np.zeros(ranks * elements, np.float32), NamedSharding(mesh, P(AXIS)))
    ms, _ = median_ms(jax.jit(moved), (x,), repeats)
    return 4 * elements / ms / 1e6


def bytes_moved(bench: Bench, stats: dict[str, np.ndarray]) -> dict[str, float]:
    """Bytes that leave the fullest sender: tokens of a dispatch, matrices of a prefetch; round 0."""
    args, ranks = bench.args, bench.ranks
    row = args.width * bench.dtype.itemsize + 8 * args.top_k
    capacity = min(args.capacity or default_capacity(ranks, args.top_k, args.tokens), args.tokens)
    rows = {
        "gather": (ranks - 1) * args.tokens,
        "padded": (ranks - 1) * capacity * int(stats["phases"][0]),
        "ragged": int(stats["rows_sent"].max()),
    }[bench.transport]
    slots = 0 if ranks == 1 else min(args.slots, args.experts // ranks)
    # Exact: a home may serve every filled slot; static: all slots of all others.
    filled = int(np.minimum(stats["redundant_experts"][0], slots).sum())
    matrices = filled if bench.transport == "ragged" else (ranks - 1) * slots
    return {"dispatch": rows * row, "prefetch": 3.0 * matrices * args.width * args.inner * bench.dtype.itemsize}


def used_mib() -> float:
    """MiB of the first device at the fullest moment so far, where the backend knows."""
    used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return float("nan") if used is None else used / 2**20


def measure(bench: Bench, name: str, ids: np.ndarray, link: float) -> dict:
    """One row of the result."""
    args = bench.args
    inputs = arrays(args, bench.mesh, ids)
    stats = {key: np.asarray(value) for key, value in bench.stats(*inputs[:4]).items()}
    ms, moved = bench.times(inputs, args.repeats), bytes_moved(bench, stats)
    before, after = stats["load_before"][0], stats["load_after"][0]
    rates = {key: count / ms[key] / 1e6 for key, count in moved.items()}
    return {
        "transport": bench.transport,
        "routing": name,
        "maxvio": violation(ids, args.experts),
        "rank_load_before": float(before.max() / before.mean()),
        "rank_load_after": float(after.max() / after.mean()),
        "redundant_experts": int(stats["redundant_experts"].max()),
        "rounds": int(stats["rounds"][0]),
        "phases": int(stats["phases"][0]),
        "rows_sent": stats["rows_sent"].tolist(),
        "ms": ms,
        "megabytes": {key: count / 1e6 for key, count in moved.items()},
        "gb_per_s": rates,
        "of_link": {key: rate / link for key, rate in rates.items()},
        "planned_mib": bench.planned_mib(inputs),
        "used_mib": used_mib(),
    }


def table(rows: list[dict], title: str) -> Table:
    """The rows for the terminal; the last column compares with the first row of the same transport."""
    shown = Table(title=title)
    for column in ("transport", "MaxVio"):
        shown.add_column(column)
    heads = ("load max/mean", "redundant", "rounds", "phases", *PIECES, *WHOLE, "GB/s (link)", "MiB", "vs first")
    for column in heads:
        shown.add_column(column, justify="right")
    first: dict[str, float] = {}
    for row in rows:
        whole = row["ms"]["forward + backward"]
        base = first.setdefault(row["transport"], whole)
        shown.add_row(
            row["transport"],
            f"{row['maxvio']:.2f}{' on rank 0' if row['routing'] == 'hot' else ''}",
            f"{row['rank_load_before']:.2f} -> {row['rank_load_after']:.2f}",
            *(str(row[key]) for key in ("redundant_experts", "rounds", "phases")),
            *(f"{row['ms'][name]:.2f}" for name in (*PIECES, *WHOLE)),
            f"{row['gb_per_s']['dispatch']:.1f} ({row['of_link']['dispatch']:.0%})",
            f"{row['planned_mib']:,.0f}",
            f"{whole / base:.3f}",
        )
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help="of each rank")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--width", type=int, default=384, help="in which tokens travel")
    parser.add_argument("--inner", type=int, default=384, help="inside an expert")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--transport", nargs="+", default=["gather", "padded", "ragged"])
    parser.add_argument("--maxvio", type=float, nargs="*", default=[0.2, 1, 4, 16])
    parser.add_argument("--hot", type=float, default=16, help="MaxVio of the row with all hot experts on one rank")
    parser.add_argument("--slots", type=int, default=2, help="redundant experts a rank has room for")
    parser.add_argument("--capacity", type=int, help="rows of a pair in one phase of padded")
    parser.add_argument("--implementation", default="auto", help="of the grouped matmul")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--link-mib", type=int, default=256, help="of each device in the measurement of the link")
    parser.add_argument("--json", type=Path, help="write everything here")
    args = parser.parse_args()
    if args.experts % jax.device_count():
        parser.error(f"{args.experts} experts do not divide over {jax.device_count()} devices")
    return args


def main() -> None:
    args, console = parse(), Console()
    ranks = jax.device_count()
    mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    link = link_rate(mesh, args.link_mib, args.repeats)
    chosen, lines = weigh(ranks, args.top_k, args.tokens, args.width, jnp.dtype(args.dtype).itemsize, args.capacity)
    console.print(render(chosen, lines))
    console.print(f"link {link:.1f} GB/s a direction")
    skews = [(str(vio), vio) for vio in args.maxvio] + [("hot", args.hot)]
    rows = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(args.transport) * len(skews))
        drawn = {
            name: choices(ranks * args.tokens, args.top_k, args.experts, vio, name == "hot") for name, vio in skews
        }
        for transport in args.transport:
            bench = Bench(args, mesh, transport)
            for name, ids in drawn.items():
                rows.append(measure(bench, name, ids, link))
                progress.advance(task)
    device = jax.devices()[0].device_kind
    title = (
        f"routed experts on {ranks} x {device}: {args.tokens} tokens a rank, {args.experts} experts, {args.top_k} a "
        f"token, {args.width} x {args.inner}, {args.dtype}; ms, median of {args.repeats}; jax {jax.__version__}"
    )
    console.print(table(rows, title))
    if args.json:
        said = {"title": title, "args": {k: str(v) for k, v in vars(args).items()}, "link_gb_per_s": link}
        args.json.write_text(json.dumps(said | {"auto": chosen, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
