"""Held-out loss: nats a token and bits a byte."""

import math
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3train.data.batch import Batch
from k3train.data.holdout import Holdout, Holdouts, holdouts
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
      sources: the same of each of several sources, by name.
    """

    loss: float
    bits_per_byte: float
    tokens: int
    sources: "dict[str, Score]"

    def as_json(self) -> dict[str, Any]:
        """Values by name, the sources' nested where there are several."""
        found = self._asdict() | {"sources": {name: score.as_json() for name, score in self.sources.items()}}
        return found if self.sources else {name: value for name, value in found.items() if name != "sources"}

    def metrics(self) -> dict[str, float]:
        """Values by the names of ``metrics.jsonl``."""
        return {
            f"eval/holdout{of}/{name}": value
            for of, score in [("", self), *((f"-{name}", score) for name, score in self.sources.items())]
            for name, value in (("loss", score.loss), ("bpb", score.bits_per_byte), ("tokens", score.tokens))
        }


def score_of(nats: float, data: Holdout | Holdouts, sources: dict[str, Score] | None = None) -> Score:
    """What the sum of nats over held-out text comes to."""
    bits = nats / math.log(2) / max(data.source_bytes, 1)
    return Score(nats / max(data.supervised, 1), bits, data.supervised, sources or {})


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
        values = iter([float(value) for value in nats])
        sums = {name: math.fsum(islice(values, len(part))) for name, part in self.data.parts.items()}
        each = {name: score_of(sums[name], part) for name, part in self.data.parts.items() if name}
        return score_of(math.fsum(sums.values()), self.data, each)
