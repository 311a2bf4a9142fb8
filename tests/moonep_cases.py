"""Parity of MoonEP with a dense mixture of experts, for tests in this process and for a worker with more devices.

    python tests/moonep_cases.py 8 gather,2,0 padded,2,2     # ranks, then transport,slots,capacity (0: default)

As a script it prints one JSON line a case: what ``compare`` returns.
"""

import functools
import json
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from k3train.parallel.moonep.config import Options
from k3train.parallel.moonep.routed import routed

TOKENS, TOP_K, EXPERTS, WIDTH, INNER = 10, 3, 32, 6, 5
ROUTINGS = ("even", "skewed", "one_expert", "one_rank", "same_experts")


class Case(NamedTuple):
    """One compiled layer."""

    ranks: int
    transport: str
    slots: int
    capacity: int | None
    dtype: str = "float32"
    implementation: str = "blocked"


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * jnp.tanh(up)


def choices(routing: str, ranks: int, *, seed: int = 0) -> np.ndarray:
    """[R S, k] int32 choices; distinct but for ``one_expert``, where all of them are the same expert."""
    rng = np.random.default_rng(seed)
    tokens = ranks * TOKENS
    score = rng.random((tokens, EXPERTS))
    match routing:
        case "skewed":
            score = score + 3 * rng.random(EXPERTS) ** 3
        case "one_expert":
            return np.full((tokens, TOP_K), EXPERTS - 2, np.int32)
        case "one_rank":
            score = score + (np.arange(EXPERTS) // (EXPERTS // ranks) == ranks - 1)
        case "same_experts":
            score = np.broadcast_to(score[0], score.shape)
    return np.argsort(-score, axis=1)[:, :TOP_K].astype(np.int32)


def arrays(ranks: int, dtype: str = "float32", *, seed: int = 1):
    """(z, weights, matrices), dy; z and the matrices hold numbers of ``dtype``."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype).astype(jnp.float32)

    tokens = ranks * TOKENS
    matrices = draw(EXPERTS, WIDTH, INNER), draw(EXPERTS, WIDTH, INNER), draw(EXPERTS, INNER, WIDTH)
    weights = jnp.asarray(rng.random((tokens, TOP_K)), jnp.float32)
    return (draw(tokens, WIDTH).astype(dtype), weights, matrices), draw(tokens, WIDTH)


def dense(z, ids, weights, matrices):
    """The oracle: every assignment with its own copy of its expert's matrices, in float32."""
    w1, w3, w2 = matrices
    z = z.astype(jnp.float32)
    gate = jnp.einsum("nl,nklm->nkm", z, w1[ids])
    up = jnp.einsum("nl,nklm->nkm", z, w3[ids])
    return jnp.einsum("nkm,nkml,nk->nl", activation(gate, up), w2[ids], weights)


def layer(case: Case, replicas: int = 1):
    """(z, ids, weights, matrices) -> (y, statistics by rank) over R devices, times ``replicas``; not compiled."""
    options = Options(case.transport, case.slots, case.capacity)  # type: ignore[arg-type]

    def one(z, ids, weights, matrices):
        y, stats = routed(
            z, ids, weights, matrices, axis="expert", activation=activation, options=options,
            implementation=case.implementation, block=8,  # type: ignore[arg-type]
        )  # fmt: skip
        return y, jax.tree.map(lambda a: a[None], stats)

    mesh = jax.make_mesh(
        (replicas, case.ranks), ("data", "expert"), axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: replicas * case.ranks],
    )  # fmt: skip
    tokens = P(("data", "expert"))
    specs = tokens, tokens, tokens, P("expert")
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)


def with_gradients(function):
    """(diff, ids, dy) -> ((y, statistics), gradients of ``sum(y * dy)``)."""

    def run(diff, ids, dy):
        def loss(z, weights, matrices):
            y, stats = function(z, ids, weights, matrices)
            return jnp.sum(y * dy), (y, stats)

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*diff)
        return out, grads

    return run


@functools.cache
def compiled(case: Case):
    return jax.jit(with_gradients(layer(case)))


@functools.cache
def oracle():
    return jax.jit(with_gradients(lambda z, ids, weights, matrices: (dense(z, ids, weights, matrices), None)))


def compare(case: Case, routing: str) -> dict:
    """Differences from the oracle by array, greatest (``max``) and by norm, relative; and the statistics of rank 0."""
    ids = jnp.asarray(choices(routing, case.ranks))
    diff, dy = arrays(case.ranks, case.dtype)
    (y, stats), grads = compiled(case)(diff, ids, dy)
    (want, _), want_grads = oracle()((diff[0].astype(jnp.float32), *diff[1:]), ids, dy)
    names = ("y", "z", "weights", "w1", "w3", "w2")
    worst, norm = {}, {}
    for name, got, wanted in zip(names, jax.tree.leaves((y, grads)), jax.tree.leaves((want, want_grads)), strict=True):
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        assert np.all(np.isfinite(got)), name
        worst[name] = float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))
        norm[name] = float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))
    stats = {name: np.asarray(value)[0].tolist() for name, value in stats.items()}
    return {"case": case, "routing": routing, "max": worst, "norm": norm, "stats": stats}


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_default_matmul_precision", "highest")
    for text in sys.argv[2:]:
        transport, slots, capacity = text.split(",")
        case = Case(int(sys.argv[1]), transport, int(slots), int(capacity) or None)
        for routing in ROUTINGS:
            print(json.dumps(compare(case, routing)), flush=True)


if __name__ == "__main__":
    main()
