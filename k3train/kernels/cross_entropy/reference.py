"""Cross entropy with all logits at once: slow, obvious, differentiated by JAX."""

import jax
import jax.numpy as jnp

from k3train.kernels.numerics import wide


def cross_entropy(
    hidden: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, z_loss: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss sum, z sum, correct) of ``api.cross_entropy``."""
    logits = wide(hidden) @ wide(head.astype(hidden.dtype))  # [N, V]
    lse = jax.nn.logsumexp(logits, axis=-1)
    target_logit = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    loss = jnp.sum(jnp.where(mask, lse - target_logit, 0))
    z = z_loss * jnp.sum(jnp.where(mask, lse**2, 0))
    correct = jnp.sum(mask & (jnp.argmax(logits, axis=-1) == targets), dtype=jnp.int32)
    return loss, z, correct
