"""Which sections of a model need which, and what sizes go together. Imports no JAX."""

from collections.abc import Iterator

from k3train.config.rules import Fault
from k3train.models.config import ModelConfig


def model_faults(model: ModelConfig) -> Iterator[Fault]:
    """Every broken rule of the model section."""
    for rule in (sections, experts, groups, blocks, decay_bound):
        yield from rule(model)


def sections(model: ModelConfig) -> Iterator[Fault]:
    """A kind of layer needs the section with its sizes."""
    kinds = model.layers.kinds()
    users = {
        "kda": ("layers.kda", [i for i, kind in enumerate(kinds, 1) if kind.mixer == "kda"]),
        "mla": ("layers.mla", [i for i, kind in enumerate(kinds, 1) if kind.mixer == "mla"]),
        "ffn": ("layers.first_dense", [i for i, kind in enumerate(kinds, 1) if kind.ffn == "dense"]),
        "moe": ("layers.first_dense", [i for i, kind in enumerate(kinds, 1) if kind.ffn == "moe"]),
    }
    for name, (key, layers) in users.items():
        if layers and getattr(model, name) is None:
            yield Fault(
                (f"model.{name}", f"model.{key}"),
                f"layer {layers[0]} needs the section model.{name}",
                f"give model.{name} its sizes, or change model.layers so that no layer is of that kind",
            )
    if model.mtp is not None:
        for key, kind in (("mixer", model.mtp.mixer), ("ffn", model.mtp.ffn)):
            name = "ffn" if kind == "dense" else kind
            if getattr(model, name) is None:
                yield Fault(
                    (f"model.mtp.{key}", f"model.{name}"),
                    f"the prediction layer needs the section model.{name}",
                    f"give model.{name} its sizes, or choose another model.mtp.{key}",
                )


def experts(model: ModelConfig) -> Iterator[Fault]:
    """A token cannot choose more experts than there are."""
    moe = model.moe
    if moe is not None and moe.top_k > moe.num_experts:
        yield Fault(
            ("model.moe.top_k", "model.moe.num_experts"),
            f"a token cannot choose {moe.top_k} of {moe.num_experts} experts",
            f"set model.moe.top_k to {moe.num_experts} or less, or add experts",
        )


def groups(model: ModelConfig) -> Iterator[Fault]:
    """Group-limited routing: whole groups of at least two, and enough experts in those that are kept."""
    moe = model.moe
    if moe is None or moe.router.groups == 1 == moe.router.groups_used:
        return
    count, used = moe.router.groups, moe.router.groups_used
    if moe.num_experts % count:
        yield Fault(
            ("model.moe.router.groups", "model.moe.num_experts"),
            f"{moe.num_experts} experts do not divide into {count} groups",
            "make num_experts a multiple of groups, or set groups: 1",
        )
    elif used > count:
        yield Fault(
            ("model.moe.router.groups_used", "model.moe.router.groups"),
            f"{used} of {count} groups cannot be kept",
            f"set groups_used to {count} or less",
        )
    elif count > 1 and moe.num_experts // count < 2:
        yield Fault(
            ("model.moe.router.groups", "model.moe.num_experts"),
            "a group is scored by its two best experts, and these hold one each",
            f"set groups to {moe.num_experts // 2} or less",
        )
    elif moe.top_k > moe.num_experts // count * used:
        yield Fault(
            ("model.moe.top_k", "model.moe.router.groups_used"),
            f"{used} groups of {moe.num_experts // count} hold fewer than top_k {moe.top_k} experts",
            "raise groups_used or lower top_k",
        )


def blocks(model: ModelConfig) -> Iterator[Fault]:
    """A block of attention residuals is no longer than the model."""
    residual, layers = model.attn_residual, model.layers.count
    if residual.kind == "block" and residual.block_size > layers:
        yield Fault(
            ("model.attn_residual.block_size", "model.layers.count"),
            f"a block of {residual.block_size} layers never ends in a model of {layers}",
            f"set block_size to {layers} or less, or model.attn_residual.kind to full or none",
        )


def decay_bound(model: ModelConfig) -> Iterator[Fault]:
    """The bounded gate's log-decay lies between its bound and zero."""
    if model.kda is not None and model.kda.gate == "bounded" and model.kda.gate_lower_bound >= 0:
        yield Fault(
            ("model.kda.gate_lower_bound",),
            f"a log-decay bounded by {model.kda.gate_lower_bound} never decays",
            "set it below 0 (K3: -5)",
        )
