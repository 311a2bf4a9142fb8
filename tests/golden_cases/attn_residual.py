"""Attention-residual cases: the mixing op, and the residual stream of several layers with plain matrices as parts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3train.kernels.attn_residual.api import Row, mix
from k3train.kernels.config import KernelsConfig
from k3train.models.block import DecoderLayer, Depth
from k3train.models.config import LayersConfig, ModelConfig
from k3train.models.decoder import Exit
from k3train.models.parts.attn_residual.config import AttnResidualConfig
from k3train.models.parts.ffn.config import FFNConfig
from k3train.models.parts.kda.config import KDAConfig
from k3train.models.stack import write_row


def matches(case) -> bool:
    return "block_residual" in case.arrays or "trace.output_mixed" in case.arrays


def compute(case, dtype) -> dict[str, np.ndarray]:
    return _op(case, dtype) if "block_residual" in case.arrays else _trace(case, dtype)


def _op(case, dtype) -> dict[str, np.ndarray]:
    inputs = {
        name: jnp.asarray(case.arrays[name], dtype)
        for name in ("prefix_sum", "block_residual", "proj_weight", "norm_weight")
    }
    eps = float(case.arrays["eps"])

    def run(inputs):
        bank = inputs["block_residual"].swapaxes(0, 1)[:, None]  # [N, 1, T, D]
        query = inputs["norm_weight"] * inputs["proj_weight"][0]
        mixed, _ = mix(bank, jnp.int32(len(bank)), [Row(inputs["prefix_sum"][None], True)], query, eps)
        return mixed[0]

    out, pull = jax.vjp(run, inputs)
    (grads,) = pull(jnp.asarray(case.arrays["do"], dtype))
    return {"out_o": out} | {f"out_d{name}": grad for name, grad in grads.items()}


class Matrix(nnx.Module):
    """Stands where a mixer or feed-forward network would: one published [out, in] matrix."""

    def __init__(self, weight):
        self.weight = nnx.Param(weight)

    def __call__(self, x, segment_ids=None):
        y = x @ self.weight[...].T
        return y if segment_ids is None else (y, {})


def _set_residual(residual, weights, name):
    residual.norm.set_value(weights[f"{name}_norm.weight"])
    residual.query.set_value(weights[f"{name}_proj.weight"][0])


def _trace(case, dtype) -> dict[str, np.ndarray]:
    weights = {name[2:]: jnp.asarray(array, dtype) for name, array in case.arrays.items() if name.startswith("w.")}
    x, count = jnp.asarray(case.arrays["x"], dtype), int(case.arrays["num_layers"])
    cfg = ModelConfig(
        vocab_size=8,
        hidden_size=x.shape[-1],
        norm_eps=float(case.arrays["eps"]),
        kda=KDAConfig(num_heads=1, head_dim=8),
        ffn=FFNConfig(intermediate_size=8),
        layers=LayersConfig(count=count, kda=tuple(range(1, count + 1)), first_dense=count),
        attn_residual=AttnResidualConfig(block_size=int(case.arrays["block_size"])),
    )
    starts = cfg.attn_residual.block_starts(count)

    def run(weights, x):
        trace = {}
        prefix, filled = x, 0
        bank = jnp.zeros((cfg.attn_residual.rows(count), *x.shape), x.dtype)
        for i in range(count):
            w = {name.removeprefix(f"layers.{i}."): a for name, a in weights.items() if name.startswith(f"layers.{i}.")}
            layer = DecoderLayer(cfg, cfg.layers.kinds()[i], KernelsConfig(), 0, rngs=nnx.Rngs(0))
            layer.mixer, layer.ffn = Matrix(w["attn_matrix"]), Matrix(w["mlp_matrix"])
            layer.input_norm.weight.set_value(w["input_layernorm.weight"])
            layer.post_norm.weight.set_value(w["post_attention_layernorm.weight"])
            _set_residual(layer.mixer_residual, w, "self_attention_res")
            _set_residual(layer.ffn_residual, w, "mlp_res")
            depth, start = Depth(prefix, bank, jnp.int32(filled)), jnp.asarray(starts[i])
            trace[f"trace.attn_mixed_{i}"] = layer.mixer_residual(bank, depth.filled, [Row(prefix, True)])[0]
            middle, end, _ = layer(depth, start, jnp.ones(x.shape[:2], jnp.int32))
            rows = [Row(prefix, start[0]), Row(middle, True)]
            trace[f"trace.mlp_mixed_{i}"] = layer.ffn_residual(bank, depth.filled, rows)[0]
            bank = write_row(bank, depth.filled, prefix, start[0])
            filled += int(starts[i][0])
            prefix = trace[f"trace.prefix_out_{i}"] = end
            trace[f"trace.num_blocks_{i}"] = np.asarray(filled)
        exit_ = Exit(cfg, rngs=nnx.Rngs(0))
        _set_residual(exit_.residual, weights, "output_attn_res")
        exit_.norm.weight.set_value(weights["norm.weight"])
        trace["trace.output_mixed"] = exit_.residual(bank, jnp.int32(filled), [Row(prefix, True)])[0]
        return exit_(prefix, bank), trace

    y, pull, trace = jax.vjp(run, weights, x, has_aux=True)
    d_weights, dx = pull(jnp.asarray(case.arrays["dy"], dtype))
    return trace | {"out_y": y, "out_dx": dx} | {f"out_dw.{name}": grad for name, grad in d_weights.items()}
