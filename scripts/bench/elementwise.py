"""Times what XLA makes of the parts of a layer that are no matrix product, beside the least bytes they must move.

    python scripts/bench/elementwise.py                                        # k3_mini, 8 x 4096 tokens
    python scripts/bench/elementwise.py configs/experiments/k3_400m.yaml --rows 16

Least bytes: every array of the part read or written once a pass, in bfloat16; the backward pass reads its inputs again
and nothing the forward pass could have kept. ``copy`` shows what the memory gives. Median of many calls.
"""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3train.config.load import load
from k3train.experiment import Experiment
from k3train.kernels.attn_residual.api import Row, mix
from k3train.kernels.causal_conv.api import causal_conv
from k3train.models.config import ModelConfig
from k3train.models.parts.ffn.layer import glu
from k3train.models.parts.kda.layer import gated_norm
from k3train.models.parts.norm.layer import rms_norm


class Part(NamedTuple):
    """A function, its arguments, and what its passes must move."""

    function: Callable
    arrays: tuple
    """Differentiated in all."""
    touched: tuple[int, int]
    """Arrays of the result's size and dtype, read or written by a forward and a backward pass."""


def parts(model: ModelConfig, rows: int, tokens: int) -> dict[str, Part]:
    """The parts by name, on random bfloat16 arrays."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
        # One row, repeated: drawing all takes longer than everything that is timed.
        one = jnp.asarray(rng.standard_normal(shape[1:], np.float32), dtype)
        return jnp.tile(one[None], (shape[0], *[1] * len(shape[1:])))

    wide = lambda *shape: drawn(*shape, dtype=jnp.float32)  # noqa: E731
    width, heads, head = model.kda.width, model.kda.num_heads, model.kda.head_dim
    hidden, eps = model.hidden_size, model.norm_eps
    ids = jnp.asarray(np.tile(1 + np.arange(tokens) // 300, (rows, 1)), jnp.int32)
    per_head = drawn(rows, tokens, heads, head), drawn(rows, tokens, heads, head)
    token = drawn(rows, tokens, hidden)
    bank = jnp.stack([token] * 3)

    def depth_mix(bank, partial, query):
        return mix(bank, jnp.int32(3), [Row(partial, True)], query, eps)[0]

    return {
        "copy": Part(lambda x: -x, (drawn(rows, tokens, width),), (2, 2)),
        "short convolution, SiLU": Part(
            lambda x, w: causal_conv(x, w, segment_ids=ids),
            (drawn(rows, tokens, width), wide(model.kda.conv_size, width)),
            (2, 3),
        ),
        "heads' gated norm": Part(
            lambda o, gate, w: gated_norm(o, w, gate, eps).astype(o.dtype), (*per_head, wide(head)), (3, 5)
        ),
        "norm": Part(lambda x, w: rms_norm(x, w, eps), (token, wide(hidden)), (2, 3)),
        "depth mix of 4 rows": Part(depth_mix, (bank, token, wide(hidden)), (5, 9)),
        "gated unit": Part(
            lambda g, u: glu(g, u, model.activation),
            (drawn(rows, tokens, model.ffn.intermediate_size), drawn(rows, tokens, model.ffn.intermediate_size)),
            (3, 5),
        ),
    }


def timed(call: Callable, repeats: int, burst: int = 10) -> float:
    """Median milliseconds a call."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = None
        for _ in range(burst):
            result = call()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / burst)
    return 1e3 * float(np.median(times))


def cells(part: Part, repeats: int, bandwidth: float) -> list[str]:
    """Milliseconds, least milliseconds and their ratio of both passes."""

    def backward(arrays, cotangent):
        return jax.vjp(part.function, *arrays)[1](cotangent)

    result = jax.jit(part.function)(*part.arrays)
    calls = (
        lambda run=jax.jit(part.function): run(*part.arrays),
        lambda run=jax.jit(backward): run(part.arrays, result),
    )
    found = []
    for call, touched in zip(calls, part.touched, strict=True):
        ms, least = timed(call, repeats), 1e3 * touched * result.nbytes / bandwidth
        found += [f"{ms:.3f}", f"{least:.3f}", f"{ms / least:.1f}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default="configs/experiments/k3_mini.yaml")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes a second, for the least time")
    options = parser.parse_args()
    model = load(options.config, [], Experiment).experiment.model
    table = Table(
        title=f"{options.config}, {options.rows} x {options.tokens}; "
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    )
    table.add_column("part")
    for direction in ("forward", "backward"):
        for column in (f"{direction} ms", "least", "times"):
            table.add_column(column, justify="right")
    for name, part in parts(model, options.rows, options.tokens).items():
        table.add_row(name, *cells(part, options.repeats, options.bandwidth))
    Console().print(table)


if __name__ == "__main__":
    main()
