"""Expert router: scores, groups and weights (k3-facts 5.1). Imports no JAX."""

from typing import Literal

from k3train.config.section import Positive, PositiveFloat, Section


class RouterConfig(Section, drift="frozen"):
    """How a token's experts and their weights follow from its router scores."""

    score: Literal["sigmoid", "softmax"] = "sigmoid"
    """How router logits become scores."""
    renormalize: bool = True
    """Divide the chosen scores by their sum (never for top-1)."""
    scale: PositiveFloat = 1.0
    """Factor on the weights (``routed_scaling_factor``)."""
    groups: Positive = 1
    """Groups of equal size into which experts are cut; 1 for no grouping."""
    groups_used: Positive = 1
    """Groups kept a token, by the sum of each group's two best biased scores."""
