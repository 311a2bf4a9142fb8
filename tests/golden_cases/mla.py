"""Golden cases of the MLA layer: outputs and gradients from published weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.kernels.config import KernelsConfig
from k3train.models.parts.mla.config import MLAConfig
from k3train.models.parts.mla.layer import MLA
from k3train.models.parts.mla.names import names


def matches(case) -> bool:
    """Whether the case holds an MLA layer: its key and value projection has a name of its own."""
    return "w.kv_a_proj_with_mqa.weight" in case.arrays


def segment_ids(case, tokens: int) -> np.ndarray | None:
    """[1, T] documents from 1, from either form in which packed cases give them; none if not packed."""
    if "doc_ids" in case.arrays:
        ids = case.arrays["doc_ids"]
        return (ids - ids.min() + 1).astype(np.int32)
    if "cu_seqlens" in case.arrays:
        ends = case.arrays["cu_seqlens"][1:]
        return np.searchsorted(ends, np.arange(tokens), side="right")[None].astype(np.int32) + 1
    return None


def compute(case, dtype) -> dict[str, np.ndarray]:
    """Every ``out_*`` array of the case, in ``dtype``."""
    meta = json.loads(str(case.arrays["meta_json"]))
    cfg = MLAConfig(
        num_heads=meta["num_heads"],
        q_lora_rank=meta["q_lora_rank"],
        kv_lora_rank=meta["kv_lora_rank"],
        qk_nope_head_dim=meta["qk_nope_head_dim"],
        qk_shared_head_dim=meta["qk_rope_head_dim"],
        v_head_dim=meta["v_head_dim"],
        output_gate=meta["use_output_gate"],
        latent_norm_eps=meta["latent_norm_eps"],
    )
    x, dy = (jnp.asarray(case.arrays[name], dtype) for name in ("x", "dy"))
    kernels = KernelsConfig(attention_block=16)  # several blocks in these short rows
    module = nnx.eval_shape(lambda: MLA(cfg, meta["hidden_size"], 0.02, kernels, rngs=nnx.Rngs(0)))
    graph, shapes = nnx.split(module)
    stored = names(cfg)

    def load(path, leaf):
        where = stored[".".join(map(str, path))]
        return leaf.replace(jnp.asarray(where.to_ours(case.arrays[f"w.{where.name}"], leaf.shape), dtype))

    state = nnx.from_flat_state([(path, load(path, leaf)) for path, leaf in nnx.to_flat_state(shapes)])
    ids = segment_ids(case, x.shape[1])

    def loss(state, x):
        y, _ = nnx.merge(graph, state)(x, None if ids is None else jnp.asarray(ids))
        return jnp.sum(y * dy), y

    (_, y), (dw, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, x)
    out = {"out_y": y, "out_dx": dx}
    for path, leaf in nnx.to_flat_state(dw):
        where = stored[".".join(map(str, path))]
        out[f"out_dw.{where.name}"] = where.to_stored(np.asarray(leaf[...]))
    return {name: np.asarray(array) for name, array in out.items()}
