"""Golden cases of the gated activation, the router and the mixture of experts."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.models.param import Buffer
from k3train.models.parts.ffn.config import ActivationConfig
from k3train.models.parts.ffn.layer import glu
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.moe.layer import MoE
from k3train.models.parts.moe.names import names
from k3train.models.parts.router.config import RouterConfig
from k3train.models.parts.router.layer import route


def is_router(case) -> bool:
    """A router by itself."""
    return {"weight", "bias", "ddense"} <= case.arrays.keys()


def is_activation(case) -> bool:
    """A gated activation by itself."""
    return {"gate", "up", "out_dgate"} <= case.arrays.keys()


def is_moe(case) -> bool:
    """A whole mixture of experts."""
    return "w.experts.0.w1.weight" in case.arrays


def matches(case) -> bool:
    """Whether this module knows the case."""
    return is_router(case) or is_activation(case) or is_moe(case)


def compute(case, dtype) -> dict[str, np.ndarray]:
    """Every ``out_*`` array of the case, in ``dtype``."""
    solve = activation if is_activation(case) else router if is_router(case) else mixture
    return {name: np.asarray(array) for name, array in solve(case, dtype).items()}


def activation(case, dtype):
    linear = float(case.arrays["linear_beta"])
    cfg = ActivationConfig(beta=float(case.arrays["beta"]), linear_beta=None if math.isnan(linear) else linear)
    gate, up, do = (jnp.asarray(case.arrays[name], dtype) for name in ("gate", "up", "do"))
    y, pull = jax.vjp(lambda gate, up: glu(gate, up, cfg), gate, up)
    d_gate, d_up = pull(do)
    return {"out_y": y, "out_dgate": d_gate, "out_dup": d_up}


def router(case, dtype):
    cfg = RouterConfig(
        score=str(case.arrays["score_func"]),
        renormalize=bool(case.arrays["renormalize"]),
        scale=float(case.arrays["scale"]),
        groups=int(case.arrays["n_group"]),
        groups_used=int(case.arrays["topk_group"]),
    )
    x, weight, bias, d_dense = (jnp.asarray(case.arrays[name], dtype) for name in ("x", "weight", "bias", "ddense"))

    def dense(x, weight):
        routing = route(x, weight.T, bias, cfg, int(case.arrays["top_k"]))
        rows = jnp.arange(x.shape[0])[:, None]
        return jnp.zeros_like(routing.scores).at[rows, routing.ids].set(routing.weights), routing.ids

    weights, pull, ids = jax.vjp(dense, x, weight, has_aux=True)
    dx, d_weight = pull(d_dense)
    return {
        "out_dense_weights": weights,
        "out_indices_sorted": np.sort(np.asarray(ids), axis=1),
        "out_dx": dx,
        "out_dweight": d_weight,
        "out_load": np.bincount(np.asarray(ids).reshape(-1), minlength=weight.shape[0]),
    }


def mixture(case, dtype):
    meta = json.loads(str(case.arrays["meta_json"]))
    cfg = MoEConfig(
        num_experts=meta["num_experts"],
        top_k=meta["top_k"],
        intermediate_size=meta["moe_intermediate_size"],
        num_shared=meta["num_shared_experts"],
        latent_size=meta.get("latent"),
        latent_norm=meta.get("latent_norm", False),
        router=RouterConfig(scale=meta["scale"], renormalize=meta["renormalize"]),
    )
    if "beta" in meta:
        act = ActivationConfig(beta=meta["beta"], linear_beta=meta["linear_beta"])
    else:
        act = ActivationConfig(kind="swiglu")
    eps = meta.get("norm_eps", 1e-5)
    make = lambda: MoE(cfg, meta["hidden"], act, eps, 0.02, KernelsConfig(), 0, rngs=nnx.Rngs(0))  # noqa: E731
    graph, shapes = nnx.split(nnx.eval_shape(make))
    stored = names(cfg)

    def load(path, leaf):
        where = stored[".".join(map(str, path))]
        if "{expert}" in where.name:
            one = [
                where.to_ours(case.arrays[f"w.{where.name.format(expert=e)}"], leaf.shape[1:]) for e in range(len(leaf))
            ]
            return leaf.replace(jnp.asarray(np.stack(one), dtype))
        return leaf.replace(jnp.asarray(where.to_ours(case.arrays[f"w.{where.name}"], leaf.shape), dtype))

    state = nnx.from_flat_state([(path, load(path, leaf)) for path, leaf in nnx.to_flat_state(shapes)])
    graph, params, buffers = nnx.split(nnx.merge(graph, state), nnx.Param, Buffer)
    x, dy = (jnp.asarray(case.arrays[name], dtype) for name in ("x", "dy"))

    def loss(params, x):
        y, _ = nnx.merge(graph, params, buffers)(x)
        return jnp.sum(y * dy), y

    (_, y), (dw, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    out = {"out_y": y, "out_dx": dx}
    for path, leaf in nnx.to_flat_state(dw):
        where, grad = stored[".".join(map(str, path))], np.asarray(leaf[...])
        if "{expert}" in where.name:
            out |= {f"out_dw.{where.name.format(expert=e)}": where.to_stored(g) for e, g in enumerate(grad)}
        else:
            out[f"out_dw.{where.name}"] = where.to_stored(grad)
    return out
