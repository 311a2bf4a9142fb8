"""Golden cases of KDA: the op, its gate, the op on raw inputs, and the whole layer.

A case is recognised by the arrays it holds. ``case`` has ``name``, ``arrays`` (dict of NumPy arrays) and ``spec``.
"""

import json
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


def matches(case) -> bool:
    """Whether this is a KDA op, gate or layer case."""
    held = set(case.arrays)
    return held >= OP or held >= GATE or held >= LAYER


def compute(case, dtype, implementation: str = "chunked") -> dict[str, np.ndarray]:
    """Every ``out_*`` array of the case, computed in ``dtype``."""
    held = set(case.arrays)
    if held >= OP:
        out = _op(case.arrays, dtype, implementation)
    elif held >= GATE:
        out = _gate(case.arrays, dtype)
    else:
        out = _layer(case.arrays, dtype, implementation)
    return {name: np.asarray(value) for name, value in out.items() if name in held}


def _bound(arrays) -> float | None:
    """``lower_bound``, stored as NaN for the softplus form."""
    value = float(arrays["lower_bound"])
    return None if np.isnan(value) else value


def _segments(bounds: np.ndarray) -> np.ndarray:
    """[1, T] segment ids from cumulative lengths."""
    return np.repeat(np.arange(1, len(bounds)), np.diff(bounds))[None].astype(np.int32)


def _split(x: jax.Array, bounds: np.ndarray) -> jax.Array:
    """A packed row [1, T, ...] to one padded row a segment [N, longest, ...]."""
    longest = int(np.diff(bounds).max())
    parts = [x[0, lo:hi] for lo, hi in pairwise(bounds)]
    return jnp.stack([jnp.pad(p, ((0, longest - len(p)),) + ((0, 0),) * (p.ndim - 1)) for p in parts])


def _merge(x: jax.Array, bounds: np.ndarray) -> jax.Array:
    """The reverse of :func:`_split`."""
    return jnp.concatenate([x[n, :size] for n, size in enumerate(np.diff(bounds))])[None]


def _op(arrays, dtype, implementation: str) -> dict[str, jax.Array]:
    inputs = {
        n: jnp.asarray(arrays[n], dtype) for n in ("q", "k", "v", "g", "beta", "h0", "A_log", "dt_bias") if n in arrays
    }
    do, dht = jnp.asarray(arrays["do"], dtype), jnp.asarray(arrays["dht"], dtype)
    bounds = arrays.get("cu_seqlens")
    raw = "A_log" in arrays
    scale = float(arrays["scale"]) if "scale" in arrays else None
    normalise = raw or bool(arrays["use_qk_l2norm"])

    def prepare(p):
        q, k, g, beta = p["q"], p["k"], p["g"], p["beta"]
        if normalise:
            q, k = l2_normalize(q), l2_normalize(k)
        if raw:
            g, beta = kda_gate(g, p["A_log"], p["dt_bias"], _bound(arrays)), jax.nn.sigmoid(beta)
        return q, k, p["v"], g, beta

    def run(p):
        args, options = prepare(p), {"scale": scale, "implementation": implementation}
        if bounds is None:
            return kda(*args, initial_state=p.get("h0"), **options)
        # Final states are stored for each segment: one padded row a segment gives them all.
        ids = _split(jnp.ones_like(_segments(bounds)), bounds)
        o, ht = kda(*(_split(a, bounds) for a in args), segment_ids=ids, initial_state=p.get("h0"), **options)
        return _merge(o, bounds), ht

    def loss(p):
        o, ht = run(p)
        return jnp.sum(o * do) + jnp.sum(ht * dht), (o, ht)

    grads, (o, ht) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    out = {"out_o": o, "out_ht": ht, **{f"out_d{n}": grad for n, grad in grads.items()}}
    if bounds is not None and "h0" not in arrays:
        out |= _packed(inputs, prepare, do, dht, bounds, out, scale, implementation)
    return out


def _packed(inputs, prepare, do, dht, bounds, apart, scale, implementation: str) -> dict[str, jax.Array]:
    """o and gradients from one packed row.

    Only the last segment's state leaves a packed row, so what the other final states add to the gradients is taken
    from the rows run apart: gradient(packed, all cotangents) = packed gradient of (do, last dht) + apart's of the rest.
    """

    def packed_loss(p, do, last):
        o, ht = kda(*prepare(p), segment_ids=jnp.asarray(_segments(bounds)), scale=scale, implementation=implementation)
        return jnp.sum(o * do) + jnp.sum(ht[0] * last), o

    def others(p):
        ids = _split(jnp.ones_like(_segments(bounds)), bounds)
        _, ht = kda(
            *(_split(a, bounds) for a in prepare(p)), segment_ids=ids, scale=scale, implementation=implementation
        )
        return jnp.sum(ht[:-1] * dht[:-1])

    grads, o = jax.jit(jax.grad(packed_loss, has_aux=True))(inputs, do, dht[-1])
    rest = jax.jit(jax.grad(others))(inputs)
    return {"out_o": o, **{f"out_d{n}": grads[n] + rest[n] for n in grads}}


def _gate(arrays, dtype) -> dict[str, jax.Array]:
    inputs = {name: jnp.asarray(arrays[name], dtype) for name in ("raw", "A_log", "dt_bias")}

    def loss(p):
        g = kda_gate(p["raw"], p["A_log"], p["dt_bias"], _bound(arrays))
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
