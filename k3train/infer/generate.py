"""Writes text with the decode cache: one prefill, then one token at a time."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.tokenizer import Tokenizer
from k3train.infer.sampler import sample
from k3train.models.decoder import Decoder
from k3train.models.param import compute_copy

PREFILL_MULTIPLE = 64
"""Prompts are padded to a multiple of this, so that few lengths are compiled."""


class Generator:
    """Decoding of one model; compiled functions are kept between calls.

    Args:
      add_bos: begin as the documents of the training did (``data.add_bos``).
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, dtype: jnp.dtype, *, add_bos: bool = True):
        self._decoder, self._tokenizer, self._dtype = decoder, tokenizer, dtype
        self._start = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
        self._extend = jax.jit(self._extend_and_sample, static_argnames=("temperature", "top_p"), donate_argnums=(4,))
        self._prepare = jax.jit(partial(compute_copy, specs=decoder.specs(), dtype=dtype))

    def _extend_and_sample(
        self,
        params: dict,
        buffers: dict,
        tokens: jax.Array,
        valid: jax.Array,
        cache: dict,
        key: jax.Array,
        *,
        temperature: float,
        top_p: float,
    ) -> tuple[jax.Array, dict]:
        """Runs tokens [B, T]; draws the token after the last valid one [B]."""
        hidden, cache = self._decoder.extend(params, buffers, tokens, valid, cache)
        last = valid.sum(axis=1) - 1
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
        logits = self._decoder.logits(params, hidden)
        return sample(logits, key, temperature, top_p, self._tokenizer.vocab_size), cache

    def encode(self, prompt: str) -> np.ndarray:
        """Ids that ``prompt`` is read as, int32 [n], n > 0.

        Raises:
          UserError: it is no Unicode text, or there is nothing to go on from.
        """
        try:
            ids = np.asarray([*self._start, *self._tokenizer.encode(prompt)], np.int32)
        except UnicodeEncodeError:
            raise UserError(f"the prompt {prompt!r} is no Unicode text; give it as UTF-8", ExitCode.USAGE) from None
        if not len(ids):
            raise UserError(
                f"the prompt {prompt!r} has no tokens, and documents of this run begin with no BOS: "
                "there is nothing to go on from",
                ExitCode.USAGE,
            )
        return ids

    def stream(
        self,
        params: dict,
        buffers: dict,
        prompt: str,
        *,
        tokens: int,
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 0,
    ) -> Iterator[int]:
        """Yields up to ``tokens`` ids after ``prompt``; ends early at the tokenizer's EOS.

        Args:
          params: float32 master weights, as the training state holds them.
          temperature, top_p: see :func:`k3train.infer.sampler.sample`.

        Raises:
          UserError: see ``encode``.
        """
        ids = self.encode(prompt)
        padded = -(-len(ids) // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
        capacity = -(-(padded + tokens) // PREFILL_MULTIPLE) * PREFILL_MULTIPLE
        params = self._prepare(params)
        cache = self._decoder.init_cache(1, capacity, self._dtype)
        block = jnp.asarray(np.pad(ids, (0, padded - len(ids))))[None]
        valid = jnp.arange(padded)[None] < len(ids)
        key = jax.random.key(seed)
        for i in range(tokens):
            drawn, cache = self._extend(
                params, buffers, block, valid, cache, jax.random.fold_in(key, i), temperature=temperature, top_p=top_p
            )
            token = int(drawn[0])
            if token == self._tokenizer.eos_id:
                return
            yield token
            block, valid = drawn[:, None], jnp.ones((1, 1), bool)

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        """Text of streamed ids as soon as it is sure: a character whose bytes are not all there yet waits."""
        seen, said = [], ""
        for token in ids:
            seen.append(token)
            text = self._tokenizer.decode(seen)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(said) :]
                said = text
        yield self._tokenizer.decode(seen)[len(said) :] if seen else ""

    def text(self, params: dict, buffers: dict, prompt: str, **options) -> str:
        """The continuation of ``prompt`` as text; options as in :meth:`stream`."""
        return self._tokenizer.decode(np.asarray(list(self.stream(params, buffers, prompt, **options)), np.int32))
