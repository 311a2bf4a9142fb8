"""Packed documents on the fixed grid of 64-token chunks: one integer a token says all the kernels need."""

import jax
import jax.numpy as jnp
from jax import lax

from k3train.kernels.kda.mosaic_gpu.parts import CHUNK

VALID, HEAD, TAIL = 1, 2, 4


def codes(starts: jax.Array, valid: jax.Array) -> jax.Array:
    """[B, T] int32. Bit 0: the token is valid. Bit 1: its document began before its chunk, so the chunk's first state
    reaches it. Bit 2: its document lasts to the chunk's end, so what it writes reaches the next. Above: its number.

    Padding counts as part of the document before it.

    Args:
      starts: [B, T] bool, the tokens at which the state restarts; T a multiple of 64.
      valid: [B, T] bool.
    """
    number = lax.cumsum(starts.astype(jnp.int32), axis=1)
    chunks = number.reshape(number.shape[0], -1, CHUNK)
    last = chunks[:, :, -1:]
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0), (0, 0)))
    flags = jnp.where(chunks == before, HEAD, 0) + jnp.where(chunks == last, TAIL, 0)
    return number * 8 + flags.reshape(number.shape) + jnp.where(valid, VALID, 0)
