"""MoonEP equals the dense mixture of experts: every transport, any skew, second rounds and overflow; and what it keeps.

Transport ``ragged`` runs here on the emulation of ``ragged_all_to_all``, which XLA:CPU does not have; the real op is
compiled for H200 and TPU in test_moonep_compile.py.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import moonep_cases
import numpy as np
import pytest
from jaxprs import equations
from moonep_cases import (
    EXPERTS,
    INNER,
    ROUTINGS,
    TOKENS,
    TOP_K,
    WIDTH,
    Case,
    arrays,
    choices,
    compare,
    layer,
    oracle,
    with_gradients,
)

from k3train.parallel.moonep import config
from k3train.parallel.moonep.config import Options, default_capacity, resolve, weigh

TOLERANCE = 2e-6  # of the greatest element, float32
BFLOAT16 = 1.5e-2  # relative norm
# "one_rank" needs a second round but where there is a slot for every expert of a home (8 on 4 ranks), on 2 ranks one
# that fetches several times. Capacity 2: pairs overflow, up to five times over.
CASES = (
    Case(1, "auto", 1, None),
    Case(2, "padded", 2, 8),
    Case(2, "ragged", 1, None),
    Case(4, "gather", 8, None),
    Case(4, "padded", 1, 2),
    Case(4, "ragged", 1, None),
)
WORKER_CASES = ("gather,1,0", "padded,2,3", "ragged,2,0")


def check(found: dict, tolerance: float = TOLERANCE, kind: str = "max"):
    wrong = {name: error for name, error in found[kind].items() if not error <= tolerance}
    assert not wrong, found
    ranks, stats = found["case"][0], found["stats"]
    assert stats["load_after"] == [TOKENS * TOP_K] * ranks
    assert sum(stats["load_before"]) == ranks * TOKENS * TOP_K


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.ranks}-{c.transport}-{c.slots}-{c.capacity}")
def test_equals_dense(case, routing):
    found = compare(case, routing)
    check(found)
    slots, redundant = min(case.slots, EXPERTS // case.ranks), max(found["stats"]["redundant_experts"])
    assert found["stats"]["rounds"] == (2 if redundant > slots and case.ranks > 1 else 1)
    if routing == "one_rank" and case.ranks == 2:
        assert redundant > 2 * slots, "the case in which a second round fetches more than once does not"


@pytest.mark.parametrize("transport", ["gather", "padded", "ragged"])
def test_bfloat16_stays_near_float32(transport):
    case = Case(2, transport, 1, 4, "bfloat16")
    for routing in ("skewed", "one_rank"):
        check(compare(case, routing), BFLOAT16, "norm")


def test_replicas_go_their_own_rounds():
    """Two replicas of two ranks: one needs a single round and phase, the other two of one and several of the other."""
    case = Case(2, "padded", 1, 4)
    ids = jnp.asarray(np.concatenate([choices("one_expert", 2), choices("one_rank", 2)]))
    diff, dy = arrays(4)
    (y, stats), grads = jax.jit(with_gradients(layer(case, replicas=2)))(diff, ids, dy)
    assert stats["rounds"][0] == 1 and stats["rounds"][2] == 2
    (want, _), want_grads = oracle()(diff, ids, dy)
    for got, wanted in zip(jax.tree.leaves((y, grads)), jax.tree.leaves((want, want_grads)), strict=True):
        assert np.max(np.abs(got - wanted)) <= TOLERANCE * np.max(np.abs(wanted))


@pytest.mark.slow
def test_eight_ranks():
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, moonep_cases.__file__, "8", *WORKER_CASES],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert not done.returncode, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(WORKER_CASES) * len(ROUTINGS)
    for one in found:
        check(one)
    assert max(one["stats"]["rounds"] for one in found) > 1


@pytest.fixture(scope="module", params=["gather", "padded", "ragged"])
def program(request):
    """(gradient's program, the residuals it keeps) of one layer on four ranks, all choices open to the caller."""
    # The reference matmul: the blocked one's own weight gradient adds blocks to experts, which is its business.
    run = layer(Case(4, request.param, 1, 2, implementation="reference"))
    (z, weights, matrices), dy = arrays(4)
    ids = jnp.asarray(choices("even", 4))

    def call(z, weights, matrices):
        return run(z, ids, weights, matrices)[0]

    def gradient(z, weights, matrices):
        return jax.vjp(call, z, weights, matrices)[1](dy)

    kept = jax.eval_shape(lambda *args: jax.tree.leaves(jax.vjp(call, *args)[1]), z, weights, matrices)
    return jax.make_jaxpr(gradient)(z, weights, matrices).jaxpr, kept


def test_no_float_is_scattered(program):
    jaxpr, _ = program
    names = {e.primitive.name for e in equations(jaxpr)}
    assert "gather" in names and "sort" in names, "the walk does not reach the inner programs"
    scattered = [e for e in equations(jaxpr) if e.primitive.name.startswith("scatter")]
    floats = [e for e in scattered if jnp.issubdtype(e.outvars[0].aval.dtype, jnp.floating)]
    assert not floats, floats
    # Integers go to places of their own, never added up.
    assert all(e.primitive.name == "scatter" and e.params["unique_indices"] for e in scattered)


def test_backward_keeps_the_inputs_and_integers(program):
    _, kept = program
    floats = sorted(leaf.shape for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.floating))
    tokens = 4 * TOKENS
    inputs = [(tokens, WIDTH), (tokens, TOP_K), *[(EXPERTS, WIDTH, INNER)] * 2, (EXPERTS, INNER, WIDTH)]
    assert floats == sorted(inputs)
    # Every rank's plan: alloc [E, R] and the list of redundant experts, alike on all four, and three arrays [S, k].
    integers = sorted(leaf.shape for leaf in kept if jnp.issubdtype(leaf.dtype, jnp.integer))
    assert all(int(np.prod(shape)) <= max(tokens * TOP_K, 4 * EXPERTS * 4) for shape in integers), integers


def test_rematerialisation_keeps_the_plan():
    run = layer(Case(2, "gather", 1, None))
    (z, weights, matrices), dy = arrays(2)
    ids = jnp.asarray(choices("one_rank", 2))
    policy = jax.checkpoint_policies.save_only_these_names("routing")

    def grads(function):
        def loss(z, weights, matrices):
            return jnp.sum(function(z, ids, weights, matrices)[0] * dy)

        return jax.grad(loss, argnums=(0, 1, 2))

    saved = jax.checkpoint(run, policy=policy)
    program = jax.make_jaxpr(grads(saved))(z, weights, matrices).jaxpr
    plain = jax.make_jaxpr(grads(run))(z, weights, matrices).jaxpr

    def planners(jaxpr):
        # Only the planner takes the fullest rank.
        return sum(e.primitive.name == "argmin" for e in equations(jaxpr))

    assert planners(program) == planners(plain) == 1
    got, want = jax.jit(grads(saved))(z, weights, matrices), oracle()((z, weights, matrices), ids, dy)[1]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= TOLERANCE * np.max(np.abs(b))


def test_ranks_need_a_slot():
    run = layer(Case(2, "gather", 0, None))
    (z, weights, matrices), _ = arrays(2)
    with pytest.raises(ValueError, match="redundant_slots is 0"):
        run(z, jnp.asarray(choices("even", 2)), weights, matrices)


def test_auto_weighs_bytes():
    name, lines = weigh(2, 8, 8192, 3584, 2)
    assert name == "gather", "two ranks, eight choices: nearly every token goes to both"
    assert [line.transport for line in lines] == ["gather", "padded", "ragged"]
    assert lines[0].rows == 8192 and lines[0].megabytes == pytest.approx(8192 * (2 * 3584 * 2 + 64) / 1e6)
    assert weigh(64, 8, 8192, 3584, 2)[0] == "padded"
    # A capacity that overflows again and again is dearer than exact rows.
    assert weigh(64, 8, 8192, 3584, 2, capacity=964)[0] == "ragged"
    assert lines == weigh(2, 8, 8192, 3584, 2)[1]
    assert resolve(Options(), 64, 8, 8192, 3584, 2) == "padded"
    assert resolve(Options("ragged"), 2, 8, 8192, 3584, 2) == "ragged"
    assert default_capacity(2, 8, 100) == 100
    assert default_capacity(64, 8, 8192) % 8 == 0
    assert min(config.RELATIVE_RATE.values()) > 0


@pytest.mark.slow
def test_bench_runs_on_cpu(root, tmp_path):
    environ = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "PYTHONPATH": str(root),
    }
    sizes = {"tokens": 48, "experts": 16, "top-k": 2, "width": 8, "inner": 4, "slots": 1, "capacity": 16, "repeats": 1}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        str(root / "scripts/bench/moonep.py"),
        *options,
        "--link-mib",
        "1",
        "--transport",
        "padded",
    ]
    command += ["--maxvio", "0.5", "--hot", "3", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400)
    assert not done.returncode, done.stderr
    even, hot = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert even["rank_load_after"] == hot["rank_load_after"] == 1.0
    assert hot["rank_load_before"] > even["rank_load_before"] >= 1.0
    assert even["phases"] > 1 and hot["rounds"] >= even["rounds"] >= 1
    assert all(ms > 0 for row in (even, hot) for ms in row["ms"].values())
    assert even["megabytes"]["prefetch"] == pytest.approx(3 * 8 * 4 * 2 / 1e6)
