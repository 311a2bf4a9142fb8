"""The train and eval sections: batch, budget, precision, memory. Imports no JAX."""

from typing import Literal

from pydantic import model_validator

from k3train.config.section import Count, Free, NonNegative, Positive, Section, Strings


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
        return self


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
