"""Held-out loss: nats a token and bits a byte."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k3train.data.batch import Batch
from k3train.data.holdout import holdouts
from k3train.data.stores import Stores
from k3train.models.param import compute_copy
from k3train.parallel.axes import batch_sharding, replicated
from k3train.train.assembly import Assembly
from k3train.train.loss import token_entropy


class Score(NamedTuple):
    """Result of one evaluation.

    Attributes:
      loss: nats a supervised token.
      bits_per_byte: nats / ln 2 over bytes of text (convention in ``data/holdout.py``).
      tokens: supervised tokens.
    """

    loss: float
    bits_per_byte: float
    tokens: int


class Evaluator:
    """Scores weights on the held-out documents of all sources; compiled once."""

    def __init__(self, parts: Assembly, stores: Stores):
        self._parts, exp = parts, parts.exp
        self._feed, rows = parts.feed(self.rows), self.rows
        self.data = holdouts(
            stores,
            exp.data.sequence_length,
            rows,
            exp.eval.max_rows,
            part=self._feed.index,
            parts=self._feed.count,
        )
        self._sharding = batch_sharding(parts.mesh)
        self._score: Callable = jax.jit(self._batch_nats)

    @property
    def rows(self) -> int:
        """Rows scored at a time: as many as the last stage's steps take."""
        stage = self._parts.course.stages[-1]
        return stage.rows // stage.accumulation

    def compile(self) -> None:
        """Compile now for the weights of the run's state (call it with the mesh set)."""
        state, exp = self._parts.factory.abstract, self._parts.exp
        shape = (self.rows, exp.data.sequence_length)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._sharding)
        mask = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=self._sharding)
        lowered = jax.jit(self._batch_nats, out_shardings=replicated(self._parts.mesh)).lower(
            state["params"], state["buffers"], Batch(ids, ids, ids, mask)
        )
        self._score = lowered.compile()

    def _batch_nats(self, params: dict, buffers: dict, batch: Batch) -> jax.Array:
        """Sum of the batch's cross-entropy, wide scalar."""
        decoder, kernels = self._parts.decoder, self._parts.exp.kernels
        params = compute_copy(params, decoder.specs(), self._parts.compute_dtype)
        hidden = decoder(params, buffers, batch.tokens, batch.segment_ids).main
        return token_entropy(hidden, decoder.head(params), batch.targets, batch.loss_mask, kernels).loss_sum

    def __call__(
        self, params: dict, buffers: dict, tick: Callable[[int, int], None] = lambda done, total: None
    ) -> Score:
        """Scores float32 weights on all rows; ``tick`` hears how many batches of how many are done, and may raise."""
        nats, total = [], len(self.data)
        with jax.set_mesh(self._parts.mesh):
            for i, local in enumerate(self.data):
                batch = Batch(*map(self._feed, local))
                nats.append(self._score(params, buffers, batch))
                jax.block_until_ready(nats[-2:-1])  # one batch ahead of the devices, so that ``tick`` keeps their pace
                tick(i + 1, total)
        sum_nats = math.fsum(float(value) for value in nats)
        return Score(
            sum_nats / max(self.data.supervised, 1),
            sum_nats / math.log(2) / max(self.data.source_bytes, 1),
            self.data.supervised,
        )
