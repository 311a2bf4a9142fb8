"""Times MLA's attention, forward and forward + backward: our Hopper kernels, cuDNN and the blockwise form.

    python scripts/bench/attention.py                                   # the shapes of SHAPES
    python scripts/bench/attention.py --shape 1x65536x32x1 --implementation mosaic_gpu cudnn
    python scripts/bench/attention.py --pieces                          # our kernels one by one as well

A shape is rows x tokens x heads x documents of a row, of equal length. Keys have 128 channels of a head's own and 64 of
all heads, values 128. cuDNN takes one width only: q and k as they are, v filled up to 192 with zeros, and keys expanded
to heads, both outside the time; it knows no documents here and sees whole rows, so only rows of one document compare.
A time is the wall clock of calls queued back to back, the median of --repeats such runs; TFLOP/s count the pairs that
may attend (the causal half of each document) and no recomputation: 2 (192 + 128) a pair forward, 2 x 832 more backward.
"""

import argparse
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.kernels.attention.api import attention
from k3train.kernels.attention.mosaic_gpu import backward, forward
from k3train.kernels.attention.mosaic_gpu.bounds import bounds
from k3train.kernels.attention.mosaic_gpu.parts import OWN, SHARED, VALUE, Operands

SHAPES = ("1x8192x96x1", "4x4096x32x1", "1x8192x96x12", "1x16384x32x12")
SCALE = (OWN + SHARED) ** -0.5
FORWARD, BACKWARD = 2 * (OWN + SHARED + VALUE), 2 * (3 * (OWN + SHARED) + 2 * VALUE)
QUEUED = 5
"""Calls, whose results are all held at a time."""


def drawn(rows: int, tokens: int, heads: int, documents: int) -> SimpleNamespace:
    """Normal bfloat16 arrays, never zeros, and segment ids."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    normal = lambda *size: jax.random.normal(next(keys), size, jnp.bfloat16)  # noqa: E731
    head = lambda width: normal(rows, tokens, heads, width)  # noqa: E731
    ids = np.tile(np.arange(tokens) * documents // tokens + 1, (rows, 1)).astype(np.int32)
    return SimpleNamespace(
        q=head(OWN + SHARED), k=head(OWN), shared=normal(rows, tokens, SHARED), v=head(VALUE), do=head(VALUE),
        ids=jnp.asarray(ids),
    )  # fmt: skip


def ours(implementation: str, a: SimpleNamespace):
    """The op and its differentiable arguments."""

    def op(q, k, shared, v, ids):
        return attention(
            q,
            k,
            v,
            shared=shared,
            scale=SCALE,
            segment_ids=ids,
            implementation=implementation,  # type: ignore[arg-type]
        )[0]

    return op, (a.q, a.k, a.shared, a.v), (a.ids,)


def cudnn(a: SimpleNamespace):
    """The same for cuDNN."""
    shared = jnp.broadcast_to(a.shared[:, :, None], (*a.k.shape[:3], SHARED))
    k = jnp.concatenate([a.k, shared], axis=-1)
    v = jnp.pad(a.v, [(0, 0)] * 3 + [(0, k.shape[-1] - VALUE)])
    op = partial(jax.nn.dot_product_attention, scale=SCALE, is_causal=True, implementation="cudnn")
    return op, (a.q, k, v), ()


def passes(op, wide: bool, arguments: tuple, rest: tuple, do: jax.Array) -> dict:
    """The two functions that are timed, and what they take."""

    def both(arguments, rest, do):
        o, pull = jax.vjp(lambda *x: op(*x, *rest), *arguments)
        return o, pull(do.astype(o.dtype))

    do = jnp.pad(do, [(0, 0)] * 3 + [(0, OWN + SHARED - VALUE)]) if wide else do
    return {
        "forward": (lambda arguments, rest: op(*arguments, *rest), (arguments, rest)),
        "forward + backward": (both, (arguments, rest, do)),
    }


def pieces(a: SimpleNamespace) -> dict:
    """Our kernels one by one, of what the ones before them give."""
    given = Operands(a.q, a.k, a.shared, a.v, a.ids, a.ids)
    found = forward.forward(given, bounds(a.ids), SCALE)
    delta = jnp.sum(a.do.astype(jnp.float32) * found.o, axis=-1).swapaxes(1, 2)
    back = (given, a.do, found.log_sum, delta)

    def of(kernel):
        return lambda given, *rest: kernel(given, bounds(given.key_ids), *rest, SCALE)

    return {
        "kernel: forward": (lambda given: forward.forward(given, bounds(given.key_ids), SCALE), (given,)),
        "kernel: forward, narrow output": (
            lambda given: forward.forward(given, bounds(given.key_ids), SCALE, jnp.bfloat16), (given,)
        ),
        "kernel: queries": (of(backward.queries), back),
        "kernel: keys": (of(backward.keys), back),
        "bounds": (bounds, (a.ids,)),
    }  # fmt: skip


def measured(function, arguments: tuple, repeats: int) -> tuple[float, float | None]:
    """Milliseconds a call, and the MiB it needs besides arguments and results."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready([compiled(*arguments) for _ in range(QUEUED)])
        times.append(1e3 * (time.perf_counter() - began) / QUEUED)
    memory = compiled.memory_analysis()
    return float(np.median(times)), None if memory is None else memory.temp_size_in_bytes / 2**20


def flops(name: str, pairs: float) -> float | None:
    """Counted work of a pass."""
    match name:
        case "forward" | "kernel: forward" | "kernel: forward, narrow output":
            return FORWARD * pairs
        case "forward + backward":
            return (FORWARD + BACKWARD) * pairs
        case "kernel: queries":  # scores and the gradient of probabilities once more
            return 2 * (2 * (OWN + SHARED) + VALUE) * pairs
        case "kernel: keys":
            return 2 * (2 * (OWN + SHARED) + 2 * VALUE) * pairs
    return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="rows x tokens x heads x documents of a row")
    parser.add_argument("--implementation", nargs="+", default=["mosaic_gpu", "cudnn", "blockwise"])
    parser.add_argument("--pieces", action="store_true", help="our kernels one by one as well")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    options = parse()
    table = Table(title=f"MLA's attention; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for column in ("shape BxTxHxdocuments", "implementation", "pass"):
        table.add_column(column)
    for column in ("median ms", "TFLOP/s", "needed MiB"):
        table.add_column(column, justify="right")
    for shape in options.shape:
        rows, tokens, heads, documents = map(int, shape.split("x"))
        pairs = rows * heads * documents * (tokens / documents) ** 2 / 2
        a = drawn(rows, tokens, heads, documents)
        for implementation in options.implementation:
            rival = implementation == "cudnn"
            if rival and documents > 1:
                continue
            op, arguments, rest = cudnn(a) if rival else ours(implementation, a)
            todo = passes(op, rival, arguments, rest, a.do)
            if options.pieces and implementation == "mosaic_gpu":
                todo |= pieces(a)
            for name, (function, args) in todo.items():
                try:
                    ms, mib = measured(function, args, options.repeats)
                except Exception as error:  # one that does not run must not hide the others
                    table.add_row(shape, implementation, name, f"{type(error).__name__}: {str(error)[:120]}", "", "")
                    continue
                work = flops(name, pairs)
                speed = "" if work is None else f"{work / ms / 1e9:.0f}"
                table.add_row(shape, implementation, name, f"{ms:.3f}", speed, "-" if mib is None else f"{mib:,.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
