"""QK-Clip: shrinks query and key weights of heads whose logits grew too large (k3-facts 9.1, K2 report)."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp


class HeadWidths(Protocol):
    """What is read of an ``MLAConfig``: the widths of a head's parts."""

    @property
    def qk_nope_head_dim(self) -> int:
        """Query and key part of the head's own."""
        ...

    @property
    def qk_shared_head_dim(self) -> int:
        """Part whose key all heads share."""
        ...

    @property
    def v_head_dim(self) -> int:
        """Value."""
        ...


class QKClip(NamedTuple):
    """What :func:`qk_clip` gives back."""

    params: dict[str, jax.Array]
    heads: jax.Array
    """Clipped heads, int32 scalar."""
    min_gamma: jax.Array
    """Smallest factor, scalar; 1 where nothing was clipped."""


def qk_clip(params: Mapping[str, jax.Array], max_logit: jax.Array, tau: float, cfg: HeadWidths) -> QKClip:
    """Scales each head's logits by gamma = min(1, tau / max_logit).

    Query and key parts that belong to the head share the factor (sqrt(gamma) each); the key part that all
    heads share cannot be touched, so its query part takes gamma whole. Values stay.

    Args:
      params: arrays of one MLA part, each with any leading axes: ``q_b_proj`` or ``q_proj``
        [..., n, H*(nope+shared)] and ``kv_b_proj`` [..., kv_lora, H*(nope+v)]; others pass through.
      max_logit: [..., H] largest scaled logit of the step, over all tokens and devices; a value that is
        not finite clips nothing.
      tau: largest logit allowed.
      cfg: head widths (an ``MLAConfig``).
    """
    over = (max_logit > tau) & jnp.isfinite(max_logit)
    gamma = jnp.where(over, tau / jnp.where(over, max_logit, 1), 1)  # [..., H]
    root = jnp.sqrt(gamma)
    nope = cfg.qk_nope_head_dim
    query = "q_b_proj" if "q_b_proj" in params else "q_proj"
    q_factor = _columns((root, nope), (gamma, cfg.qk_shared_head_dim))
    kv_factor = _columns((root, nope), (jnp.ones_like(gamma), cfg.v_head_dim))
    clipped = {
        query: params[query] * q_factor.astype(params[query].dtype),
        "kv_b_proj": params["kv_b_proj"] * kv_factor.astype(params["kv_b_proj"].dtype),
    }
    return QKClip({**params, **clipped}, jnp.sum(over, dtype=jnp.int32), jnp.min(gamma))


def _columns(*parts: tuple[jax.Array, int]) -> jax.Array:
    """Factor of each column [..., 1, H*width] from (factor [..., H], width) pairs side by side in a head."""
    wide = [jnp.repeat(factor[..., None], width, axis=-1) for factor, width in parts]  # [..., H, width]
    joined = jnp.concatenate(wide, axis=-1)
    return joined.reshape(*joined.shape[:-2], 1, -1)
