"""Expert router: which experts a token takes, and with which weights (k3-facts 5.1).

The bias steers the choice only; weights are the unbiased scores of the chosen. Ids, weights and cut-off
carry the checkpoint name "routing": a rematerialised block keeps them, because a recomputed top-k may
flip on a rounding and the backward pass would then belong to other experts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from k3train.kernels.numerics import wide, wide_dtype
from k3train.models.parts.router.config import RouterConfig


class Routing(NamedTuple):
    """Where N tokens go."""

    ids: jax.Array
    """[N, k] int32 chosen experts, best first; ties take the lower id."""
    weights: jax.Array
    """[N, k] wide, weight of each chosen expert."""
    scores: jax.Array
    """[N, E] wide, unbiased scores."""
    cutoff: jax.Array
    """[N] wide, the biased score an expert must pass to be chosen; see :func:`route`."""


def route(x: jax.Array, weight: jax.Array, bias: jax.Array, cfg: RouterConfig, top_k: int) -> Routing:
    """Chooses ``top_k`` experts a token.

    With groups, a group's score is the sum of its two best biased scores, and only experts of the
    ``groups_used`` best groups can be chosen. The cut-off is the (k+1)-th largest biased score among the
    experts that can be chosen, or the least of them where there are only k.

    Args:
      x: [N, D] hidden states.
      weight: [D, E].
      bias: [E]; no gradient flows to it.
      cfg: scores, groups, normalisation and scale.
      top_k: experts a token.

    Returns:
      The routing; gradient flows from its weights and scores to ``x`` and ``weight``.
    """
    if x.dtype != weight.dtype:
        x, weight = wide(x), wide(weight)
    logits = jnp.matmul(x, weight, preferred_element_type=wide_dtype(x.dtype))  # [N, E]
    scores = jax.nn.sigmoid(logits) if cfg.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    biased = jax.lax.stop_gradient(scores + bias.astype(scores.dtype)[None])
    if cfg.groups > 1:
        biased = _keep_best_groups(biased, cfg)
    can_choose = scores.shape[1] // cfg.groups * cfg.groups_used
    best, ids = jax.lax.top_k(biased, min(top_k + 1, can_choose))
    ids = checkpoint_name(ids[:, :top_k], "routing")
    weights = jnp.take_along_axis(scores, ids, axis=1)  # [N, k]
    if cfg.renormalize and top_k > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    weights = checkpoint_name(weights * cfg.scale, "routing")
    return Routing(ids, weights, scores, checkpoint_name(best[:, -1], "routing"))


def _keep_best_groups(biased: jax.Array, cfg: RouterConfig) -> jax.Array:
    """``biased`` [N, E] with -inf outside each token's ``groups_used`` best groups."""
    tokens, experts = biased.shape
    grouped = biased.reshape(tokens, cfg.groups, experts // cfg.groups)
    best = jnp.sum(jax.lax.top_k(grouped, min(2, grouped.shape[2]))[0], axis=-1)  # [N, G]
    chosen = jax.lax.top_k(best, cfg.groups_used)[1]  # [N, used]
    keep = jnp.any(chosen[:, :, None] == jnp.arange(cfg.groups, dtype=chosen.dtype)[None, None], axis=1)  # [N, G]
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(tokens, experts)
