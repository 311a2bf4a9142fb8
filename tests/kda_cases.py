"""Inputs of the bfloat16 kernels of the delta rule, and what the float64 recurrence makes of the same numbers."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from k3train.kernels.kda.api import kda, kda_from_raw
from k3train.kernels.kda.gate import kda_gate, l2_normalize

WIDTH = 128
RESULTS = 8e-3
"""Relative norm of an error in outputs and states."""
GRADIENTS = 1e-2
"""The same, each gradient by itself."""
DOCUMENTS = (50, 30, -10, 20, 3, 17)
"""Lengths of documents, negative for padding; 130 tokens, three chunks."""


def ids(lengths: tuple[int, ...], rows: int = 1) -> jax.Array:
    """Segment ids [rows, T]."""
    numbers = [np.full(abs(n), i + 1 if n > 0 else 0) for i, n in enumerate(lengths)]
    return jnp.asarray(np.tile(np.concatenate(numbers)[None], (rows, 1)), jnp.int32)


def inputs(tokens: int, heads: int = 2, rows: int = 1, *, gate: str = "bounded", decay: float = -2.0, seed: int = 0):
    """Arguments of the fused entry, by name: tokens in bfloat16, parameters and state in float32.

    Args:
      tokens, heads, rows: sizes.
      gate: bounded, softplus or given (then ``g`` is a log-decay, and q and k of unit length).
      decay: offset of the raw gate; the larger, the faster the state is forgotten.
      seed: of the generator.
    """
    rng = np.random.default_rng(seed)
    normal = lambda *size: jnp.asarray(rng.standard_normal(size), jnp.float32)  # noqa: E731
    token = lambda: normal(rows, tokens, heads, WIDTH).astype(jnp.bfloat16)  # noqa: E731
    found = {"q": token(), "k": token(), "v": token(), "g": token(), "beta": normal(rows, tokens, heads)}
    found["a_log"] = jnp.asarray(rng.uniform(0.0, 1.5, heads), jnp.float32)
    found["dt_bias"] = normal(heads * WIDTH) + decay
    found["state"] = normal(rows, heads, WIDTH, WIDTH)
    if gate == "given":
        found["g"] = kda_gate(found["g"], found.pop("a_log"), found.pop("dt_bias"), -5.0)
        found["q"], found["k"] = (l2_normalize(found[n]).astype(jnp.bfloat16) for n in ("q", "k"))
        found["beta"] = jax.nn.sigmoid(found["beta"])
    return found


def cotangents(arguments, segment_ids, gate: str):
    """Of o (bfloat16) and of the last state: what (|o|^2 + |state|^2) / 2 would give, plus as much at random.

    Under random numbers alone the gradient of A_log, one number a head, is a sum of thousands of terms of either sign
    and now and then next to nothing with nothing gone wrong; without them k's is almost along k, where the norm
    takes it away.
    """
    rng = np.random.default_rng(1)
    found = _run(gate, segment_ids is not None, False)(*_wide(arguments, segment_ids))
    noisy = [x + np.std(x) * rng.standard_normal(x.shape) for x in (found["o"], found["end"])]
    return jnp.asarray(noisy[0], jnp.bfloat16), jnp.asarray(noisy[1], jnp.float32)


def bound(gate: str) -> float | None:
    return None if gate == "softplus" else -5.0


def kernels(arguments, segment_ids, gate: str):
    """o and the last state by the kernels."""
    a = arguments
    rest = {"segment_ids": segment_ids, "initial_state": a["state"], "implementation": "mosaic_gpu"}
    tokens = a["q"], a["k"], a["v"], a["g"], a["beta"]
    if gate == "given":
        return kda(*tokens, scale=WIDTH**-0.5, **rest)
    return kda_from_raw(*tokens, a["a_log"], a["dt_bias"], lower_bound=bound(gate), **rest)


def value_and_gradients(arguments, segment_ids, gate: str, pulled=None):
    """Everything the kernels compute, by name; ``pulled`` are other cotangents than :func:`cotangents`."""
    d_o, d_state = pulled or cotangents(arguments, segment_ids, gate)
    (o, state), pull = jax.vjp(lambda a: kernels(a, segment_ids, gate), arguments)
    return {"o": o, "end": state} | pull((d_o, d_state))[0]


@cache
def _run(gate: str, packed: bool, gradients: bool):
    def run(arguments, segment_ids):
        a = dict(arguments)
        if gate != "given":
            a["q"], a["k"] = l2_normalize(a["q"]), l2_normalize(a["k"])
            a["g"] = kda_gate(a["g"], a["a_log"], a["dt_bias"], bound(gate))
            a["beta"] = jax.nn.sigmoid(a["beta"])
        rest = {"segment_ids": segment_ids if packed else None, "initial_state": a["state"]}
        return kda(a["q"], a["k"], a["v"], a["g"], a["beta"], implementation="recurrent", **rest)

    def value(arguments, segment_ids):
        return dict(zip(("o", "end"), run(arguments, segment_ids), strict=True))

    def both(arguments, segment_ids, cotangents):
        (o, state), pull = jax.vjp(lambda a: run(a, segment_ids), arguments)
        return {"o": o, "end": state} | pull(cotangents)[0]

    jitted = jax.jit(both if gradients else value)

    def in_float64(*args):
        with jax.enable_x64(True):
            return {name: np.asarray(x) for name, x in jitted(*args).items()}

    return in_float64


def _wide(arguments, segment_ids):
    """Arguments in float64, as NumPy arrays, and segment ids, of some kind."""
    places = np.zeros((), np.int32) if segment_ids is None else np.asarray(segment_ids)
    return {name: np.asarray(x, np.float64) for name, x in arguments.items()}, places


def wanted(arguments, segment_ids, gate: str) -> dict[str, np.ndarray]:
    """The same in float64, token by token."""
    pulled = tuple(np.asarray(x, np.float64) for x in cotangents(arguments, segment_ids, gate))
    return _run(gate, segment_ids is not None, True)(*_wide(arguments, segment_ids), pulled)


def errors(found, want) -> dict[str, float]:
    """Relative norm of each error; absolute where all of ``want`` is next to nothing."""
    far = {}
    for name, w in want.items():
        difference = np.linalg.norm(np.asarray(found[name], np.float64) - w)
        far[name] = float(difference / max(np.linalg.norm(w), 1e-3))
    return far


def assert_near(found, want) -> None:
    far = errors(found, want)
    limits = {name: RESULTS if name in ("o", "end") else GRADIENTS for name in far}
    print(shown := "  ".join(f"{name} {error:.1e}" for name, error in far.items()))  # the figures of docs/log.md
    assert all(far[name] <= limits[name] for name in far), shown
