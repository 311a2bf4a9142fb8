"""Times the delta rule's implementations against each other on one GPU: ours, FLA's, FlashKDA's, pure JAX; one table.

    python scripts/bench/kda_peers.py                      # the shapes of the table, K3's gate
    python scripts/bench/kda_peers.py --gate softplus --shape 4x4096x32 --repeats 50 --packed

Everybody gets the same work, from raw projections in bfloat16: gate, unit q and k and beta's sigmoid are included.
FLA (``fla``, its own Triton kernels) and FlashKDA (``flash_kda``, forward only, bounded gate only) are timed where they
are installed, with torch. ``floor`` is the time that the bytes an implementation must read and write take at 4.3 TB/s,
or its least arithmetic at 790 TFLOP/s, whichever is longer (H200); a share above 100% would be an error. Memory is
what a call needs besides arguments and results. Times are wall time a call, of ``--burst`` calls queued one after the
other, median.
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs room too
os.environ["FLA_FLASH_KDA"] = "0"  # FLA would call FlashKDA where it is installed

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.kernels.kda.api import Implementation, kda_from_raw

WIDTH = 128
SHAPES = ("1x8192x96", "4x4096x32", "1x65536x32", "1x65536x12", "8x2048x16")
BYTES, FLOPS = {"forward": 1282, "backward": 2308}, {"forward": 180e3, "backward": 475e3}
"""Of a token and head: least traffic and arithmetic of a chunked form."""


class Timed(NamedTuple):
    """Milliseconds a call, and MiB besides arguments and results where known."""

    ms: float
    memory: float | None


def floor_ms(shape: tuple[int, int, int], backward: bool) -> float:
    """The least time on an H200, in milliseconds."""
    units = float(np.prod(shape))
    parts = ["forward", "backward"] if backward else ["forward"]
    return 1e3 * sum(max(units * BYTES[p] / 4.3e12, units * FLOPS[p] / 790e12) for p in parts)


def drawn(shape: tuple[int, int, int], packed: bool) -> dict[str, np.ndarray]:
    """Float32 inputs by name, and segment ids [B, T]: 12 documents a row where packed."""
    rng = np.random.default_rng(0)
    rows, tokens, heads = shape
    found: dict[str, np.ndarray] = {}
    found |= {
        name: rng.standard_normal((rows, tokens, heads, WIDTH), np.float32) for name in ("q", "k", "v", "g", "do")
    }
    found["beta"] = rng.standard_normal((rows, tokens, heads), np.float32)
    found["a_log"] = np.log(rng.uniform(1, 16, heads)).astype(np.float32)
    found["dt_bias"] = (rng.standard_normal(heads * WIDTH) * 0.5 - 1).astype(np.float32)
    cuts = np.sort(rng.choice(np.arange(1, tokens), 11, replace=False)) if packed else np.zeros(0, int)
    ids = 1 + np.searchsorted(cuts, np.arange(tokens), side="right")
    found["ids"] = np.tile(ids[None], (rows, 1)).astype(np.int32)
    return found


def timed(call: Callable[[], Any], wait: Callable[[Any], Any], options: argparse.Namespace) -> float:
    """Median milliseconds a call."""
    wait(call())
    times = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        result = None
        for _ in range(options.burst):
            result = call()
        wait(result)
        times.append((time.perf_counter() - began) / options.burst)
    return 1e3 * float(np.median(times))


def of_jax(run: Callable, inputs: dict[str, np.ndarray], options: argparse.Namespace) -> list[Timed | None]:
    """Forward, and forward + backward, of a function of (arrays, segment ids or None)."""
    bound = None if options.gate == "softplus" else -5.0
    wide = ("a_log", "dt_bias")
    arrays = {n: jnp.asarray(x, jnp.float32 if n in wide else jnp.bfloat16) for n, x in inputs.items() if n != "ids"}
    ids, d_o = jnp.asarray(inputs["ids"]) if options.packed else None, arrays.pop("do")

    def gradient(arrays, ids):
        o, pull = jax.vjp(lambda a: run(a, ids, bound), arrays)
        return o, pull(d_o.astype(o.dtype))  # a result that nobody takes would not be computed

    found: list[Timed | None] = []
    for function in (lambda a, i: run(a, i, bound), gradient):
        compiled = jax.jit(function).lower(arrays, ids).compile()
        memory = compiled.memory_analysis()
        ms = timed(lambda c=compiled: c(arrays, ids), jax.block_until_ready, options)
        found.append(Timed(ms, None if memory is None else memory.temp_size_in_bytes / 2**20))
    return found


def by(implementation: Implementation) -> Callable:
    """The delta rule from raw projections by one of ours, of (arrays, segment ids or None, bound)."""

    def run(arrays, ids, bound):
        a = arrays
        tokens = a["q"], a["k"], a["v"], a["g"], a["beta"], a["a_log"], a["dt_bias"]
        return kda_from_raw(*tokens, lower_bound=bound, segment_ids=ids, implementation=implementation)[0]

    return run


def of_torch(name: str, inputs: dict[str, np.ndarray], options: argparse.Namespace) -> list[Timed | None]:
    """Forward, and forward + backward, of FLA's or FlashKDA's; None for what it does not do."""
    if name == "FlashKDA" and options.gate == "softplus":
        return [None, None]
    import torch  # pyright: ignore[reportMissingImports]

    leaf = lambda n, kind: torch.tensor(inputs[n], dtype=kind, device="cuda", requires_grad=True)  # noqa: E731
    t = {n: leaf(n, torch.bfloat16) for n in ("q", "k", "v", "g", "beta", "do")}
    t |= {n: leaf(n, torch.float32) for n in ("a_log", "dt_bias")}
    cuts = None
    if options.packed:
        ends = np.flatnonzero(np.diff(inputs["ids"][0])) + 1
        cuts = torch.tensor([0, *ends, inputs["ids"].shape[1]], dtype=torch.int64, device="cuda")
    forward = _fla(t, cuts, options.gate) if name == "FLA" else _flash_kda(t, cuts, torch)
    wait = lambda _: torch.cuda.synchronize()  # noqa: E731

    def measured(call) -> Timed:
        wait(call())
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        wait(call())
        return Timed(timed(call, wait, options), (torch.cuda.max_memory_allocated() - before) / 2**20)

    def both():
        forward().backward(t["do"])
        for x in t.values():
            x.grad = None

    with torch.no_grad():
        first = measured(forward)
    return [first, None if name == "FlashKDA" else measured(both)]


def _fla(t, cuts, gate: str):
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    bounded = {"safe_gate": True, "lower_bound": -5.0} if gate == "bounded" else {}
    fused = dict.fromkeys(("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"), True)
    tokens = {n: t[n] for n in ("q", "k", "v", "g", "beta")}
    return lambda: chunk_kda(**tokens, A_log=t["a_log"], dt_bias=t["dt_bias"], cu_seqlens=cuts, **fused, **bounded)[0]


def _flash_kda(t, cuts, torch):
    import flash_kda  # pyright: ignore[reportMissingImports]

    out, bias = torch.empty_like(t["v"]), t["dt_bias"].reshape(-1, WIDTH)
    tokens = [t[n] for n in ("q", "k", "v", "g", "beta")]

    def call():
        flash_kda.fwd(*tokens, WIDTH**-0.5, out, t["a_log"], bias, -5.0, cu_seqlens=cuts)
        return out

    return call


def row(who: str, shape: tuple[int, int, int], found: list[Timed | None]) -> list[str]:
    """Cells: who, and for each pass the time, its share of the floor and the memory."""
    cells = [who]
    for one, backward in zip(found, (False, True), strict=True):
        if one is None:
            cells += ["-"] * 3
            continue
        memory = "-" if one.memory is None else f"{one.memory:,.0f}"
        cells += [f"{one.ms:.3f}", f"{100 * floor_ms(shape, backward) / one.ms:.0f}%", memory]
    return cells


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="rows x tokens x heads")
    parser.add_argument("--gate", default="bounded", choices=("bounded", "softplus"))
    parser.add_argument("--packed", action="store_true", help="twelve documents a row (peers: one row only)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--burst", type=int, default=5)
    parser.add_argument("--without", nargs="*", default=[], help="names to leave out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch_peers = {"FLA": "fla", "FlashKDA": "flash_kda"}
    table = Table(
        title=f"delta rule from raw projections, {options.gate} gate{', 12 documents' * options.packed}, "
        f"median of {options.repeats}; {jax.devices()[0].device_kind}, jax {jax.__version__}"
    )
    for column in ("shape BxTxH", "who"):
        table.add_column(column)
    for part in ("forward", "forward + backward"):
        for column in (f"{part} ms", "of floor", "MiB"):
            table.add_column(column, justify="right")
    for text in options.shape:
        rows, tokens, heads = map(int, text.split("x"))
        shape = rows, tokens, heads
        inputs = drawn(shape, options.packed)
        for who, run in (("ours", by("mosaic_gpu")), ("pure JAX", by("chunked"))):
            if who not in options.without:
                table.add_row(text, *row(who, shape, of_jax(run, inputs, options)))
        for who, package in torch_peers.items():
            if who in options.without or importlib.util.find_spec(package) is None:
                continue
            if not options.packed or rows == 1:
                table.add_row(text, *row(who, shape, of_torch(who, inputs, options)))
    Console().print(table)


if __name__ == "__main__":
    main()
