"""Times the implementations of the delta rule, forward and forward + backward, on the shapes of kernels/kda/specs.py.

    python scripts/bench/kda.py                                          # the quick start's shapes, all implementations
    python scripts/bench/kda.py --shape h200 --dtype bfloat16 --implementation chunked --chunk 64 32
    python scripts/bench/kda.py --shape 1x4096x8x128x128 --repeats 50    # rows x tokens x heads x key x value

Each row is packed: three documents and some padding. Instructions and fusions are counted in the optimized program;
``needed`` is what XLA allots besides arguments and results.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.kernels.kda.api import Implementation, kda
from k3train.kernels.kda.specs import DECAYS, H200, QUICKSTART, Shape, inputs

ARGS = ("q", "k", "v", "g", "beta", "initial_state")
SHAPES = {"quickstart": QUICKSTART, "h200": H200}


def arguments(shape: Shape, decay: str, dtype: jnp.dtype) -> tuple[list[jax.Array], jax.Array]:
    """Arrays in the order of ``ARGS``, g and the state wide whatever the dtype, and segment ids [B, T]."""
    drawn = inputs(shape, decay)  # type: ignore[arg-type]
    arrays = [jnp.asarray(drawn[n], jnp.promote_types(dtype, jnp.float32) if n in ("g", "initial_state") else dtype)
              for n in ARGS]  # fmt: skip
    cuts = np.arange(shape.tokens) * 16 // max(shape.tokens, 1)
    ids = np.select([cuts < 5, cuts < 6, cuts < 15], [1, 2, 3], 0)
    return arrays, jnp.asarray(np.tile(ids, (shape.rows, 1)), jnp.int32)


def programs(implementation: Implementation, chunk: int) -> dict:
    """The two functions that are timed, of (arrays, segment ids)."""

    def forward(arrays, ids):
        *args, state = arrays
        return kda(*args, segment_ids=ids, initial_state=state, chunk=chunk, implementation=implementation)

    def loss(arrays, ids):
        o, state = forward(arrays, ids)
        return jnp.sum(jnp.square(o.astype(state.dtype))) + jnp.sum(jnp.square(state))

    return {"forward": forward, "forward + backward": jax.grad(loss)}


def row(function, args, repeats: int) -> list[str]:
    """Compile seconds, instructions, fusions, median and best milliseconds, temporary MiB of one function."""
    began = time.perf_counter()
    compiled = jax.jit(function).lower(*args).compile()
    compile_s = time.perf_counter() - began
    lines = [line for line in (compiled.as_text() or "").splitlines() if " = " in line]
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(1e3 * (time.perf_counter() - began))
    memory = compiled.memory_analysis()
    return [
        f"{compile_s:.2f}",
        f"{len(lines):,}",
        f"{sum(' fusion(' in line for line in lines):,}",
        f"{np.median(times):.2f}",
        f"{min(times):.2f}",
        "-" if memory is None else f"{memory.temp_size_in_bytes / 2**20:,.1f}",
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="quickstart", help="quickstart, h200, or BxTxHxKxV")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    parser.add_argument("--chunk", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--implementation", nargs="+", default=["chunked", "recurrent"])
    parser.add_argument("--decay", default="bounded", choices=DECAYS)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def main() -> None:
    options = parse()
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    shapes = SHAPES.get(options.shape) or (Shape(*map(int, options.shape.split("x"))),)
    table = Table(
        title=f"delta rule, {options.dtype}, median of {options.repeats}; "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    )
    for column in ("shape BxTxHxKxV", "implementation", "pass"):
        table.add_column(column)
    for column in ("compile s", "instructions", "fusions", "median ms", "best ms", "needed MiB"):
        table.add_column(column, justify="right")
    for shape in shapes:
        args = arguments(shape, options.decay, jnp.dtype(options.dtype))
        for implementation in options.implementation:
            for chunk in options.chunk if implementation == "chunked" else [options.chunk[0]]:
                name = f"{implementation} {chunk}" if implementation == "chunked" else implementation
                for direction, function in programs(implementation, chunk).items():
                    cells = row(function, args, options.repeats)
                    table.add_row("x".join(map(str, shape)), name, direction, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
