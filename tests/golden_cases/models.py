"""Whole-model cases: a published checkpoint, its logits, hidden states, loss and every gradient."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from k3train.convert.published import model_config, tensor_prefix
from k3train.convert.tensors import export_tensors, import_tensors
from k3train.data.batch import Batch
from k3train.kernels.config import KernelsConfig
from k3train.kernels.resolve import Place, resolve
from k3train.models.block import Depth
from k3train.models.decoder import Decoder
from k3train.models.stack import write_row
from k3train.train.loss import batch_loss, count_tokens


def matches(case) -> bool:
    return (case.folder / "model.safetensors").exists() and "out_logits" in case.arrays


def _batch(ids, documents) -> Batch:
    """Next-token batch; a target counts where it is in the same document."""
    targets = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], 1)
    mask = np.concatenate([documents[:, 1:] == documents[:, :-1], np.zeros_like(documents[:, :1], bool)], 1)
    return Batch(*map(jnp.asarray, (ids, np.where(mask, targets, 0), documents, mask)))


def compute(case, dtype) -> dict[str, np.ndarray]:
    published = json.loads((case.folder / "config.json").read_text())
    cfg, prefix = model_config(published), tensor_prefix(published)
    kernels, _ = resolve(KernelsConfig(kda_chunk=16, grouped_matmul_block=8), Place("cpu"))
    decoder = Decoder(cfg, kernels)
    tensors = {name: a.astype(dtype) for name, a in load_file(case.folder / "model.safetensors").items()}
    params, buffers = jax.tree.map(jnp.asarray, import_tensors(cfg, tensors, *decoder.abstract(), prefix))
    ids, documents = case.arrays["packed_input_ids"], case.arrays["packed_doc_ids"]
    whole = _batch(case.arrays["input_ids"], np.ones_like(case.arrays["input_ids"]))
    shape = tuple(np.maximum(whole.tokens.shape, ids.shape))  # both batches padded to one shape: compiled once
    batch, packed = _pad(whole, shape), _pad(_batch(ids, documents), shape)
    out = {}

    @jax.jit
    def run(params, batch):
        def loss(params):
            hidden = decoder(params, buffers, batch.tokens, batch.segment_ids).main
            total, _ = batch_loss(decoder, params, buffers, batch, count_tokens(batch), kernels, 0.0)
            return total, (decoder.logits(params, hidden), hidden)

        return jax.value_and_grad(loss, has_aux=True)(params)

    rows, length = case.arrays["input_ids"].shape
    (out["out_loss"], (logits, hidden)), grads = run(params, batch)
    out["out_logits"], out["out_final_hidden"] = logits[:rows, :length], hidden[:rows, :length]
    zeros = jax.tree.map(jnp.zeros_like, buffers)
    named = {
        name: grad
        for name, grad in export_tensors(cfg, grads, zeros, prefix).items()
        if "e_score_correction_bias" not in name
    }
    out |= {f"grad.{name}": grad for name, grad in named.items()}
    names = json.loads(str(case.arrays["gradnorm_names_json"]))
    assert set(names) == set(named), "the checkpoint's trainable tensors are not ours"
    out["gradnorm_values"] = np.asarray([np.linalg.norm(named[name].astype(np.float64)) for name in names])
    out["out_hidden_after_layer"] = jax.jit(partial(_layer_by_layer, decoder))(params, buffers, whole)
    (out["out_packed_loss"], (logits, _)), _ = run(params, packed)
    out["out_packed_logits"] = logits[: ids.shape[0], : ids.shape[1]]
    return out


def _pad(batch: Batch, shape: tuple[int, int]) -> Batch:
    """More columns and rows of padding."""
    return Batch(*(jnp.pad(a, [(0, n - m) for n, m in zip(shape, a.shape, strict=True)]) for a in batch))


def _layer_by_layer(decoder: Decoder, params, buffers, batch) -> jax.Array:
    """The running sum after each layer [L, B, T, D], without the scan."""
    stack = decoder.stacks["layers"]
    prefix = params["embedding"]["table"][batch.tokens]
    bank = jnp.zeros((stack.rows, *prefix.shape), prefix.dtype) if stack.banked else None
    sums = []
    for i in range(decoder.cfg.layers.count):
        layer, where = stack.layer(i, params["layers"], buffers["layers"])
        _, end, _ = layer(Depth(prefix, bank, where.filled), where.starts, batch.segment_ids)
        bank = None if bank is None else write_row(bank, where.filled, prefix, where.starts[0])
        prefix = end
        sums.append(end)
    return jnp.stack(sums)
