"""Counts of the router bias each token would ask of each expert, for quantile balancing (k3-facts 5.3).

A token whose cut-off is alpha (its (k+1)-th largest biased score) selects expert j when the bias of j
exceeds r = alpha - s_j. The wanted bias of j is a quantile of r over tokens; a histogram of r can be
added up over microbatches and devices, the values themselves cannot.
"""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


def histogram_range(bias: jax.Array, bins: int) -> tuple[jax.Array, jax.Array]:
    """Where the bins lie: [min(bias) - 1, max(bias) + 1] holds every r, since scores are in [0, 1].

    Args:
      bias: [..., E] router bias under which the histogram is counted.
      bins: number of equal bins.

    Returns:
      (low, width): lower edge of the first bin and width of a bin, each [...].
    """
    low, high = jnp.min(bias, axis=-1) - 1, jnp.max(bias, axis=-1) + 1
    return low, (high - low) / bins


def histogram(scores: jax.Array, cutoff: jax.Array, bias: jax.Array, valid: jax.Array, bins: int) -> jax.Array:
    """Counts r_ij = cutoff_i - scores_ij of the valid tokens, for each expert.

    Args:
      scores: [N, E] unbiased scores in [0, 1].
      cutoff: [N] (k+1)-th largest biased score of each token.
      bias: [E] the bias that ``cutoff`` was made with.
      valid: [N] bool; padding is not counted.
      bins: number of bins.

    Returns:
      [E, bins] int32; each row sums to the number of valid tokens. No gradient flows.
    """
    scores, cutoff, bias = (jax.lax.stop_gradient(wide(x)) for x in (scores, cutoff, bias))
    low, width = histogram_range(bias, bins)
    needed = cutoff[:, None] - scores  # [N, E]
    index = jnp.clip(jnp.floor((needed - low) / width).astype(jnp.int32), 0, bins - 1)
    experts = jax.lax.broadcasted_iota(jnp.int32, index.shape, 1)
    counts = jnp.broadcast_to(valid[:, None], index.shape).astype(jnp.int32)
    # Indices stay [N, E]: with tokens sharded each device then scatters its own and the sums are added up.
    return jnp.zeros((scores.shape[1], bins), jnp.int32).at[experts, index].add(counts)
