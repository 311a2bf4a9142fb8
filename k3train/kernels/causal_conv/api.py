"""Depthwise causal convolution over packed rows (k3-facts 2.1, 2.6).

B rows, T tokens, C channels, W taps. One form serves every device: W shifted products, which XLA fuses.
"""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


def causal_conv(
    x: jax.Array,
    w: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    taps: jax.Array | None = None,
    activation: bool = True,
) -> jax.Array:
    """y_t = sum over d < W of w[W-1-d] x_{t-d}, where t-d lies in t's document; then SiLU.

    Args:
      x: [B, T, C].
      w: [W, C]; the last tap is the current token's.
      segment_ids: [B, T] integers, documents of a row counted from 1, 0 for padding; None for one document a row.
      taps: [B, W-1, C] inputs just before the row, of the document of its first token; None for zeros.
      activation: whether SiLU follows.

    Returns:
      y [B, T, C] in x's dtype; sums and SiLU are wide.
    """
    size, tokens = w.shape[0], x.shape[1]
    back = size - 1
    before = jnp.zeros((x.shape[0], back, x.shape[2]), x.dtype) if taps is None else taps.astype(x.dtype)
    inputs = wide(jnp.concatenate([before, x], axis=1))  # [B, W-1+T, C]
    ids = None
    if segment_ids is not None:
        ids = jnp.concatenate([jnp.repeat(segment_ids[:, :1], back, axis=1), segment_ids], axis=1)
    y = jnp.zeros(x.shape, inputs.dtype)
    for tap in range(size):
        term = inputs[:, tap : tap + tokens] * w[tap].astype(inputs.dtype)[None, None]
        if ids is not None and segment_ids is not None:
            term = jnp.where((ids[:, tap : tap + tokens] == segment_ids)[..., None], term, 0)
        y = y + term
    return (jax.nn.silu(y) if activation else y).astype(x.dtype)


def next_taps(x: jax.Array, taps: jax.Array, lengths: jax.Array) -> jax.Array:
    """The taps for the tokens that follow: the last W-1 inputs before each row's end.

    Args:
      x: [B, T, C] inputs of the convolution.
      taps: [B, W-1, C] inputs before them.
      lengths: [B] int32 valid tokens of each row, all at its front.

    Returns:
      [B, W-1, C] in the dtype of ``taps``.
    """
    inputs = jnp.concatenate([taps, x.astype(taps.dtype)], axis=1)
    index = lengths[:, None] + jnp.arange(taps.shape[1], dtype=lengths.dtype)[None]
    return jnp.take_along_axis(inputs, index[..., None], axis=1)
