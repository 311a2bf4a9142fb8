"""The model section: the parts' sections and which layer is of which kind. Imports no JAX."""

from typing import Literal, NamedTuple

from pydantic import model_validator

from k3train.config.section import Ints, NonNegative, Positive, PositiveFloat, Section
from k3train.models.parts.attn_residual.config import AttnResidualConfig
from k3train.models.parts.ffn.config import ActivationConfig, FFNConfig
from k3train.models.parts.kda.config import KDAConfig
from k3train.models.parts.mla.config import MLAConfig
from k3train.models.parts.moe.config import MoEConfig
from k3train.models.parts.mtp.config import MTPConfig


class LayerKind(NamedTuple):
    """What a decoder layer is made of."""

    mixer: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]


class LayersConfig(Section, drift="frozen"):
    """Which layer is of which kind; numbers count from 1, as in published configs."""

    count: Positive
    """Decoder layers."""
    kda: Ints = ()
    """Layers that mix tokens by KDA."""
    mla: Ints = ()
    """Layers that mix tokens by gated MLA."""
    first_dense: NonNegative = 1
    """Leading layers with a dense feed-forward network (``first_k_dense_replace``)."""
    moe_every: Positive = 1
    """After those, every how many layers has experts (``moe_layer_freq``)."""

    @model_validator(mode="after")
    def _covers_every_layer(self) -> "LayersConfig":
        named = sorted(self.kda + self.mla)
        if named != list(range(1, self.count + 1)):
            missing = sorted(set(range(1, self.count + 1)) - set(named))
            twice = sorted({n for n in named if named.count(n) > 1})
            beyond = sorted(n for n in set(named) if not 1 <= n <= self.count)
            faults = [
                f"{what} {which}"
                for what, which in (
                    ("in neither list:", missing),
                    ("listed twice:", twice),
                    ("outside 1..count:", beyond),
                )
                if which
            ]
            raise ValueError(
                f"layers.kda and layers.mla must name each of the {self.count} layers once; " + "; ".join(faults)
            )
        return self

    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer, first to last."""
        mla = set(self.mla)
        return tuple(
            LayerKind(
                "mla" if i + 1 in mla else "kda",
                "moe" if i >= self.first_dense and i % self.moe_every == 0 else "dense",
            )
            for i in range(self.count)
        )


class ModelConfig(Section, drift="frozen"):
    """A decoder of the Kimi K3 / Kimi Linear family."""

    vocab_size: Positive
    """Rows of the embedding table and outputs of the head."""
    hidden_size: Positive
    """Width of the hidden states."""
    layers: LayersConfig
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    ffn: FFNConfig | None = None
    moe: MoEConfig | None = None
    activation: ActivationConfig = ActivationConfig()
    attn_residual: AttnResidualConfig = AttnResidualConfig()
    mtp: MTPConfig | None = None
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of every RMSNorm but MLA's latent ones."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of every matrix at the start."""
    tie_embeddings: bool = False
    """Use the embedding table as the output head too."""
