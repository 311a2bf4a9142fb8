"""Golden cases of KDA: the op, its gate, the op on raw inputs, and the whole layer.

A case is recognised by the arrays it holds. ``case`` has ``name``, ``arrays`` (dict of NumPy arrays) and ``spec``.
"""

import json
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.kernels.kda.api import kda
from k3train.kernels.kda.gate import kda_gate, l2_normalize
from k3train.models.parts.kda.config import KDAConfig
from k3train.models.parts.kda.layer import KDA
from k3train.models.parts.kda.names import names

OP = {"q", "k", "v", "g", "beta", "do", "dht"}
GATE = {"raw", "A_log", "dt_bias", "dy"}
LAYER = {"x", "dy", "w.A_log", "w.q_conv1d.weight", "meta_json"}
IMPLEMENTATIONS = ("chunked", "recurrent")
PER_TOKEN = ("q", "k", "v", "g", "beta", "o", "do")
SHARED = ("A_log", "dt_bias")


def matches(case) -> bool:
    """Whether this is a KDA op, gate or layer case."""
    held = set(case.arrays)
    return held >= OP or held >= GATE or held >= LAYER


def compute(case, dtype, implementation: str = "chunked") -> dict[str, np.ndarray]:
    """Every ``out_*`` array of the case, computed in ``dtype``."""
    held = set(case.arrays)
    if held >= OP:
        out = op(case.arrays, dtype, implementation)
    elif held >= GATE:
        out = _gate(case.arrays, dtype)
    else:
        out = _layer(case.arrays, dtype, implementation)
    return {name: np.asarray(value) for name, value in out.items() if name in held}


def bound(arrays) -> float | None:
    """``lower_bound``, stored as NaN for the softplus form."""
    value = float(arrays["lower_bound"])
    return None if np.isnan(value) else value


def _segments(bounds: np.ndarray) -> np.ndarray:
    """[1, T] segment ids from cumulative lengths."""
    return np.repeat(np.arange(1, len(bounds)), np.diff(bounds))[None].astype(np.int32)


def _split(x: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """A packed row [1, T, ...] to one padded row a segment [N, longest, ...]."""
    longest = int(np.diff(bounds).max())
    parts = [x[0, lo:hi] for lo, hi in pairwise(bounds)]
    return np.stack([np.pad(p, ((0, longest - len(p)),) + ((0, 0),) * (p.ndim - 1)) for p in parts])


def _merge(x: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """The reverse of :func:`_split`."""
    return np.concatenate([x[n, :size] for n, size in enumerate(np.diff(bounds))])[None]


@cache
def _op_gradient(implementation: str, raw: bool, bound: float | None):
    """(inputs, l2, scale, ids, do, dht) to the gradients, o and the final states."""

    def loss(p, l2, scale, ids, do, dht):
        q, k, g, beta = p["q"], p["k"], p["g"], p["beta"]
        q, k = jnp.where(l2, l2_normalize(q), q), jnp.where(l2, l2_normalize(k), k)
        if raw:
            g, beta = kda_gate(g, p["A_log"], p["dt_bias"], bound), jax.nn.sigmoid(beta)
        rest = {"segment_ids": ids, "initial_state": p["h0"], "scale": scale, "implementation": implementation}
        o, ht = kda(q, k, p["v"], g, beta, **rest)
        return jnp.sum(o * do) + jnp.sum(ht * dht), (o, ht)

    return jax.jit(jax.grad(loss, has_aux=True))


def _rows(arrays, inputs, ids, do, dht, dtype, implementation: str) -> dict[str, np.ndarray]:
    """Results and gradients of rows; compiled for few shapes: padded to an even number of rows and to 128 tokens."""
    rows, tokens = ids.shape
    more, longer = -rows % 2, -tokens % 128 if tokens > 1 else 0

    def grow(name, x):
        widths = [(0, more), (0, longer)] if name in PER_TOKEN else [(0, more)]
        return jnp.asarray(np.pad(x, widths + [(0, 0)] * (x.ndim - len(widths))), dtype)

    raw = "A_log" in arrays
    run = _op_gradient(implementation, raw, bound(arrays) if raw else None)
    scale = float(arrays["scale"]) if "scale" in arrays else inputs["k"].shape[-1] ** -0.5
    l2 = raw or bool(arrays["use_qk_l2norm"])
    grown = {n: jnp.asarray(x, dtype) if n in SHARED else grow(n, x) for n, x in inputs.items()}
    ids = jnp.asarray(np.pad(ids, ((0, more), (0, longer))), jnp.int32)
    grads, (o, ht) = run(grown, l2, jnp.asarray(scale, dtype), ids, grow("do", do), grow("dht", dht))
    results = {"o": o, "ht": ht, **{f"d{n}": grad for n, grad in grads.items()}}

    def crop(name, x):
        x = np.asarray(x)
        if name.removeprefix("d") in SHARED:
            return x
        return x[:rows, :tokens] if name.removeprefix("d") in PER_TOKEN else x[:rows]

    return {name: crop(name, x) for name, x in results.items()}


def op(arrays, dtype, implementation: str, rows: Callable = _rows) -> dict[str, np.ndarray]:
    """The op's results; ``rows`` computes those of rows of one document, or of one packed row."""
    inputs = {n: arrays[n] for n in (*PER_TOKEN, "h0", *SHARED) if n in arrays and n not in ("o", "do")}
    inputs.setdefault("h0", np.zeros_like(arrays["dht"]))
    do, dht, bounds = arrays["do"], arrays["dht"], arrays.get("cu_seqlens")
    if bounds is None:
        ids = np.ones(do.shape[:2], np.int32)
        out = rows(arrays, inputs, ids, do, dht, dtype, implementation)
        return {f"out_{name}": x for name, x in out.items()}
    # Only the last document's state leaves a packed row: one padded row a segment gives them all.
    apart = {n: _split(x, bounds) if n in PER_TOKEN else x for n, x in inputs.items()}
    ids = _split(np.ones_like(_segments(bounds)), bounds)
    packed = "h0" not in arrays  # then o, its gradients and the last state come from the packed row itself
    cotangents = (np.zeros_like(_split(do, bounds)), dht * _not_last(dht)) if packed else (_split(do, bounds), dht)
    out = rows(arrays, apart, ids, *cotangents, dtype, implementation)
    out = {n: _merge(x, bounds) if n.removeprefix("d") in PER_TOKEN else x for n, x in out.items()}
    if packed:
        row = {**inputs, "h0": inputs["h0"][:1]}
        whole = rows(arrays, row, _segments(bounds), do, dht[-1:], dtype, implementation)
        summed = {n: out[n] + whole[n] for n in out if n[0] == "d" and n != "dh0"}
        out |= summed | {"o": whole["o"], "ht": np.concatenate([out["ht"][:-1], whole["ht"]])}
    return {f"out_{name}": x for name, x in out.items()}


def _not_last(x: np.ndarray) -> np.ndarray:
    """1 for every segment but the last, which has 0."""
    return (np.arange(len(x)) < len(x) - 1).reshape(-1, *(1,) * (x.ndim - 1))


def _gate(arrays, dtype) -> dict[str, jax.Array]:
    inputs = {name: jnp.asarray(arrays[name], dtype) for name in ("raw", "A_log", "dt_bias")}

    def loss(p):
        g = kda_gate(p["raw"], p["A_log"], p["dt_bias"], bound(arrays))
        return jnp.sum(g * jnp.asarray(arrays["dy"], dtype)), g

    grads, g = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return {"out_g": g, **{f"out_d{name}": grad for name, grad in grads.items()}}


def _layer(arrays, dtype, implementation: str) -> dict[str, jax.Array]:
    meta = json.loads(str(arrays["meta_json"]))
    bound = meta["gate_lower_bound"]
    cfg = KDAConfig(
        num_heads=meta["num_heads"],
        head_dim=meta["head_dim"],
        conv_size=meta["short_conv_kernel_size"],
        gate="softplus" if bound is None else "bounded",
        output_gate="full" if meta["use_full_rank_gate"] else "low_rank",
        **({} if bound is None else {"gate_lower_bound": bound}),
    )
    kernels = KernelsConfig(kda=implementation)
    module = nnx.eval_shape(
        lambda: KDA(cfg, meta["hidden_size"], meta["rms_norm_eps"], 0.02, kernels, rngs=nnx.Rngs(0))
    )
    graph, shapes = nnx.split(module, nnx.Param)
    shapes = nnx.to_pure_dict(shapes)
    stored = names(cfg)
    assert set(shapes) == set(stored)
    weights = {n: jnp.asarray(s.to_ours(arrays[f"w.{s.name}"], shapes[n].shape), dtype) for n, s in stored.items()}
    ids = jnp.asarray(_segments(arrays["cu_seqlens"])) if "cu_seqlens" in arrays else None

    def loss(weights, x):
        state = nnx.eval_shape(lambda: nnx.state(module))
        nnx.replace_by_pure_dict(state, weights)
        y, _ = nnx.merge(graph, state)(x, ids)
        return jnp.sum(y * jnp.asarray(arrays["dy"], dtype)), y

    (dw, dx), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, jnp.asarray(arrays["x"], dtype))
    out = {f"out_dw.{s.name}": s.to_stored(np.asarray(dw[n])) for n, s in stored.items()}
    return {"out_y": y, "out_dx": dx, **out}
