"""Parameters and FLOPs of a model by kind, from its config alone. Imports no JAX.

Reproduces the published totals exactly (k3-facts 1.4, 1.5). The parts' own formulas stand in their
``config.py``; here they are summed over the layers.
"""

from collections import Counter
from typing import NamedTuple

from k3train.models.config import LayerKind, ModelConfig


class Counts(NamedTuple):
    """Elements of a model.

    Attributes:
      trainable: elements by kind: embedding, head, norms, attn_residual, kda, mla, dense_ffn, experts,
        router, latent, shared, mtp (a whole prediction layer).
      router_bias: balanced, not trained.
      a_log_padding: zeros that published checkpoints add to A_log.
      active: trainable elements without the routed experts a token does not use.
      active_matmul: weights a token is multiplied by, the head's included, by kind (same names).
    """

    trainable: dict[str, int]
    router_bias: int
    a_log_padding: int
    active: int
    active_matmul: dict[str, int]

    @property
    def total(self) -> int:
        """Trainable elements."""
        return sum(self.trainable.values())

    @property
    def checkpoint(self) -> int:
        """Elements in a published checkpoint: trainable + router bias + A_log padding."""
        return self.total + self.router_bias + self.a_log_padding


class Flops(NamedTuple):
    """Model FLOPs a token: matrix products, KDA's state and attention, by kind; nothing recomputed, no optimizer."""

    by_kind: dict[str, int]

    @property
    def forward(self) -> int:
        """Forward pass."""
        return sum(self.by_kind.values())

    @property
    def training(self) -> int:
        """Forward and backward pass: three times the forward."""
        return 3 * self.forward


def counts(model: ModelConfig) -> Counts:
    """Counts ``model``, whose sections must fit together (``models/rules.py``)."""
    hidden, depth = model.hidden_size, model.layers.count
    table = model.vocab_size * hidden
    trainable = Counter(embedding=table, head=0 if model.tie_embeddings else table, norms=hidden)
    trainable["attn_residual"] = model.attn_residual.parameters(hidden, depth)
    matmul = Counter(head=table)
    for kind in model.layers.kinds():
        trainable.update(_layer(model, kind) | {"norms": 2 * hidden + _moe_norm(model, kind)})
        matmul.update(_layer_products(model, kind))
    if model.mtp is not None:
        kind = LayerKind(model.mtp.mixer, model.mtp.ffn)
        # Two norms at the entry, two in the layer, one at the exit; its exit mixes over depth like the main one.
        entry, vectors = 2 * hidden * hidden, 5 * hidden + _moe_norm(model, kind)
        residual = model.attn_residual.parameters(hidden, 1)
        trainable["mtp"] = entry + vectors + residual + sum(_layer(model, kind).values())
        matmul["mtp"] = entry + sum(_layer_products(model, kind).values()) + table
    kinds = _all_kinds(model)
    sparse = sum(kind.ffn == "moe" for kind in kinds)
    idle = sparse * model.moe.idle(hidden) if model.moe else 0
    return Counts(
        trainable=_nonzero(trainable),
        router_bias=sparse * model.moe.num_experts if model.moe else 0,
        a_log_padding=sum(kind.mixer == "kda" for kind in kinds) * model.kda.a_log_padding if model.kda else 0,
        active=sum(trainable.values()) - idle,
        active_matmul=_nonzero(matmul),
    )


def flops_per_token(model: ModelConfig, length: int, chunk: int = 64) -> Flops:
    """Model FLOPs a token in rows of one document of ``length`` tokens.

    Two a weight a token is multiplied by; causal attention as half the square; KDA in chunks of ``chunk``, its
    triangular inverse left out. Norms, activations, convolutions, attention residuals and routing are not counted.
    """
    by_kind = Counter({kind: 2 * weights for kind, weights in counts(model).active_matmul.items()})
    for kind in _all_kinds(model):
        if kind.mixer == "kda" and model.kda:
            by_kind["kda_state"] += model.kda.state_flops(chunk)
        elif kind.mixer == "mla" and model.mla:
            by_kind["attention"] += model.mla.attention_flops(length)
    return Flops(dict(by_kind))


def _all_kinds(model: ModelConfig) -> list[LayerKind]:
    prediction = [LayerKind(model.mtp.mixer, model.mtp.ffn)] if model.mtp else []
    return [*model.layers.kinds(), *prediction]


def _layer(model: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """Trainable elements of one layer by kind, without its norms."""
    hidden, products = model.hidden_size, _layer_products(model, kind)
    mixer = model.kda if kind.mixer == "kda" else model.mla
    assert mixer is not None
    products[kind.mixer] = mixer.parameters(hidden)
    if kind.ffn == "moe":
        assert model.moe is not None
        products["experts"] += model.moe.idle(hidden)
    return products


def _layer_products(model: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """Weights of one layer that a token is multiplied by, by kind."""
    hidden = model.hidden_size
    mixer = model.kda if kind.mixer == "kda" else model.mla
    assert mixer is not None
    out = {kind.mixer: mixer.matmul_parameters(hidden)}
    if kind.ffn == "dense":
        assert model.ffn is not None
        return out | {"dense_ffn": model.ffn.parameters(hidden)}
    assert model.moe is not None
    out |= model.moe.products(hidden)
    out["experts"] -= model.moe.idle(hidden)
    return out


def _moe_norm(model: ModelConfig, kind: LayerKind) -> int:
    return model.moe.norm_parameters() if kind.ffn == "moe" and model.moe else 0


def _nonzero(table: Counter[str]) -> dict[str, int]:
    return {kind: number for kind, number in table.items() if number}
