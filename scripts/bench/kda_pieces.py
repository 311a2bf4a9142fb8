"""Times each launch of the delta rule's Hopper kernels by itself, on one GPU; one table.

    python scripts/bench/kda_pieces.py                                    # [1, 8192, 96], K3's gate
    python scripts/bench/kda_pieces.py --gate softplus --shape 4x4096x32

``1 group`` and ``2 groups``: a block of the recurrence owns half of a head's value channels, or all of them. Median
wall time a call, of ``--burst`` calls queued one after the other. For where the time of one goes:

    ncu --clock-control none --set full -k regex:kda_gradients -c 1 python scripts/bench/kda_pieces.py --repeats 1
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.kernels.kda.mosaic_gpu import packing, passes, recurrence
from k3train.kernels.kda.mosaic_gpu.gradients import Passed, gradients
from k3train.kernels.kda.mosaic_gpu.intra import Raw, intra
from k3train.kernels.kda.mosaic_gpu.parts import WIDTH, Form


def inputs(rows: int, tokens: int, heads: int) -> tuple[Raw, jax.Array, jax.Array]:
    """Random arguments as the kernels load them, a first state, and a gradient of o."""
    rng = np.random.default_rng(0)
    normal = lambda *size: jnp.asarray(rng.standard_normal(size, np.float32))  # noqa: E731
    token = lambda: normal(rows, tokens, heads, WIDTH).astype(jnp.bfloat16)  # noqa: E731
    codes = packing.codes(jnp.zeros((rows, tokens), bool), jnp.ones((rows, tokens), bool))
    rate = jnp.broadcast_to(jnp.asarray(rng.uniform(1, 16, (heads, 1)), jnp.float32), (heads, WIDTH))
    beta, bias = jax.nn.sigmoid(normal(rows, heads, tokens)), normal(heads, WIDTH) * 0.5 - 1
    raw = Raw(token(), token(), token(), token(), None, beta, codes, rate, bias)
    return raw, jnp.zeros((rows, heads, WIDTH, WIDTH), jnp.float32), token()


def measured(form: Form, raw: Raw, state: jax.Array, d_o: jax.Array, timed: Callable) -> None:
    """Calls ``timed`` with the name, the function and the arguments of each launch and of both passes."""
    timed("intra", lambda r: intra(form, r, inverse=False), raw)
    factors = timed("intra, with the inverse", lambda r: intra(form, r, inverse=True), raw)
    for groups in (1, 2):
        name = f"{groups} group{'s' * (groups > 1)}"
        timed(f"outputs, {name}", lambda f, s, n=groups: recurrence.outputs(f, s, n), factors, state)
        kept = timed(f"states, {name}", lambda f, s, n=groups: recurrence.states(f, s, n), factors, state)
        back = timed(f"reverse, {name}", lambda f, d, s, n=groups: recurrence.reverse(f, d, s, n), factors, d_o, state)
    passed = Passed(factors.inverse, kept[1], back[1], kept[0], back[0], d_o)
    timed("gradients", lambda r, p: gradients(form, r, p), raw, passed)
    timed("forward", lambda r, s: passes.forward(form, r, s), raw, state)
    timed("backward", lambda r, s, d: passes.backward(form, r, s, d, s), raw, state, d_o)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1x8192x96", help="rows x tokens x heads; tokens a multiple of 64")
    parser.add_argument("--gate", default="bounded", choices=("bounded", "softplus"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--burst", type=int, default=5)
    options = parser.parse_args()
    table = Table(title=f"{options.shape}, {options.gate}; {jax.devices()[0].device_kind}, jax {jax.__version__}")
    table.add_column("launch")
    table.add_column("ms", justify="right")

    def timed(name: str, function: Callable, *args):
        run = jax.jit(function)
        result = last = jax.block_until_ready(run(*args))
        times = []
        for _ in range(options.repeats):
            began = time.perf_counter()
            for _ in range(options.burst):
                last = run(*args)
            jax.block_until_ready(last)
            times.append((time.perf_counter() - began) / options.burst)
        table.add_row(name, f"{1e3 * np.median(times):.3f}")
        return result

    form = Form(options.gate, -5.0 if options.gate == "bounded" else 0.0, True, WIDTH**-0.5)
    rows, tokens, heads = map(int, options.shape.split("x"))
    measured(form, *inputs(rows, tokens, heads), timed)
    Console().print(table)


if __name__ == "__main__":
    main()
