"""The train and eval sections: batch, budget, precision, memory. Imports no JAX."""

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3train.config.section import Count, Free, NonNegative, NonNegativeCount, Positive, Section, Strings
from k3train.data.course import Course, Stage


class StageConfig(Section, drift="branch"):
    """What a step is from some point of the run on, where that is not what ``train`` and ``data`` say."""

    tokens: NonNegativeCount
    """Nominal tokens (rows x length) trained on at which the stage begins, with the next step."""
    sequence_length: Positive | None = None
    """Tokens in a row, a divisor of ``data.sequence_length``, which holds by default."""
    global_batch: Positive | None = None
    """Rows in one optimizer step; ``train.global_batch`` by default."""
    accumulation: Positive | None = None
    """Microbatches of a step; ``train.accumulation`` by default."""


class TrainConfig(Section, drift="branch"):
    """What one optimizer step is, and how many there are."""

    global_batch: Positive
    """Rows (sequences) in one optimizer step, over all devices."""
    steps: Positive | None = None
    """Optimizer steps of the whole run; or give ``tokens``."""
    tokens: Count | None = None
    """Nominal tokens (rows x length) of the whole run, as 2.0B or 256Ki if you like; or give ``steps``."""
    accumulation: Free[Positive] = 1
    """Microbatches in which a step's rows are worked through."""
    curriculum: Annotated[tuple[StageConfig, ...], Field(strict=False)] = ()
    """Stages of other lengths or batches, the first at tokens: 0; each holds until the next begins."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of activations and of the weights' working copy; master weights are float32."""
    remat: Free[Literal["full", "none"]] = "full"
    """What the backward pass recomputes: each layer whole, or nothing."""
    z_loss: float = 0.0
    """Weight of the squared log-partition of the output."""

    @model_validator(mode="after")
    def _one_budget(self) -> "TrainConfig":
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("train takes either steps or tokens")
        if self.global_batch % self.accumulation:
            raise ValueError(
                f"train.accumulation {self.accumulation} must divide train.global_batch {self.global_batch}"
            )
        begins = [stage.tokens for stage in self.curriculum]
        if begins[:1] not in ([], [0]):
            raise ValueError(f"train.curriculum: the first stage begins at tokens: 0, not {begins[0]}")
        for index, (before, begin) in enumerate(pairwise(begins), 1):
            if begin <= before:
                raise ValueError(
                    f"train.curriculum[{index}].tokens: {begin} is not after the stage before, at {before}"
                )
        for index, stage in enumerate(self.curriculum):
            rows, parts = stage.global_batch or self.global_batch, stage.accumulation or self.accumulation
            if rows % parts:
                raise ValueError(
                    f"train.curriculum[{index}]: {parts} microbatches (accumulation) must divide a batch of {rows} rows"
                )
        return self

    def stages(self, sequence_length: int) -> list[Stage]:
        """What steps take over the run: the curriculum's stages, or the only one there is."""
        whole = Stage(0, self.global_batch, sequence_length, self.accumulation)
        return [
            Stage(
                stage.tokens,
                stage.global_batch or whole.rows,
                stage.sequence_length or whole.length,
                stage.accumulation or whole.accumulation,
            )
            for stage in self.curriculum
        ] or [whole]

    def empty_stages(self, sequence_length: int) -> list[tuple[int, int, int]]:
        """(number, first tokens, tokens where it ends) of the stages in which no step would begin."""
        stages = self.stages(sequence_length)
        begun = [leg.tokens for leg in Course(stages).legs]
        spans = [(n, start.tokens, end.tokens) for n, (start, end) in enumerate(pairwise(stages))]
        return [span for span in spans if not any(span[1] <= tokens < span[2] for tokens in begun)]


class EvalConfig(Section, drift="free"):
    """Held-out loss during training."""

    every: NonNegative = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    max_rows: Positive | None = None
    """Held-out rows read at most, of each source; none reads all."""


class SampleConfig(Section, drift="free"):
    """Text the model writes during training."""

    prompts: Strings = ()
    """Texts the model goes on from."""
    every: NonNegative = 0
    """Steps between samples; 0 samples at the end only."""
    tokens: Positive = 200
    """Tokens written after each prompt at most."""
    temperature: float = 0.8
    """Divisor of the logits; 0 takes the likeliest token."""
    top_p: float = 0.95
    """Probability mass that tokens are drawn from."""
