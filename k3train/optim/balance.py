"""Router-bias updates that level the experts' load, after every step and without an auxiliary loss (k3-facts 5.3)."""

import jax
import jax.numpy as jnp

from k3train.kernels.quantile_histogram.api import histogram_range
from k3train.optim.config import BalanceConfig


def update_bias(
    bias: jax.Array, histogram: jax.Array | None, load: jax.Array, cfg: BalanceConfig, top_k: int
) -> jax.Array:
    """The bias for the next step.

    Args:
      bias: [..., E] the bias of this step.
      histogram: [..., E, bins] int32 counts of the bias each token would need, over the whole step
        (all microbatches and devices); only the quantile form reads it.
      load: [..., E] assignments of the step; only the sign form reads it.
      cfg: the balance section.
      top_k: experts a token.

    Returns:
      [..., E] in ``bias``'s dtype; unchanged where no token was seen.
    """
    match cfg.kind:
        case "none":
            return bias
        case "sign":
            load = load.astype(bias.dtype)
            return bias + cfg.rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        case "quantile":
            assert histogram is not None, "quantile balancing needs the histogram"
            new = quantile_bias(bias, histogram, top_k)
            if cfg.ema is not None:
                new = cfg.ema * bias + (1 - cfg.ema) * new
            return jnp.where(jnp.sum(histogram, axis=(-2, -1))[..., None] > 0, new, bias)


def quantile_bias(bias: jax.Array, histogram: jax.Array, top_k: int) -> jax.Array:
    """The k/E quantile of the needed bias, expert by expert, centred; within a bin of the exact one.

    Args:
      bias: [..., E] that the histogram was counted with (it fixes the bins).
      histogram: [..., E, bins] int32.
      top_k: experts a token.
    """
    experts, bins = histogram.shape[-2:]
    low, width = histogram_range(bias, bins)  # [...]
    cumulative = jnp.cumsum(histogram, axis=-1)  # [..., E, bins]
    wanted = cumulative[..., -1].astype(bias.dtype) * (top_k / experts)  # q [..., E], tokens that should select
    reached = cumulative >= jnp.ceil(wanted).astype(jnp.int32)[..., None]
    at = jnp.argmax(reached, axis=-1)[..., None]  # first such bin
    inside = jnp.take_along_axis(histogram, at, axis=-1)[..., 0]
    before = jnp.take_along_axis(cumulative, at, axis=-1)[..., 0] - inside
    part = (wanted - before.astype(bias.dtype)) / jnp.maximum(inside, 1).astype(bias.dtype)
    position = at[..., 0].astype(bias.dtype) + jnp.clip(part, 0, 1)
    new = low[..., None] + position * width[..., None]
    return new - jnp.mean(new, axis=-1, keepdims=True)
