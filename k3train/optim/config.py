"""The optim section: schedule, Muon, AdamW, clipping and balancing. Imports no JAX."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3train.config.section import Fraction, Frozen, NonNegative, Positive, PositiveFloat, Section

GUARD_MEMORY = 64
"""Numbers of skipped steps that a run's state remembers, and so a bound of the guard's limits."""
Window = Annotated[int, Field(ge=2, le=2**31 - 1)]
Few = Annotated[int, Field(ge=0, lt=GUARD_MEMORY)]


class ScheduleConfig(Section, drift="branch"):
    """Learning-rate factor as a function of tokens seen (1 at the peak)."""

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    """Form of the curve after warm-up."""
    warmup: Fraction = 0.01
    """Share of the run's tokens over which the factor rises from 0 to 1."""
    decay: Fraction = 0.2
    """Share of the run's tokens over which wsd falls at the end."""
    decay_shape: Literal["linear", "sqrt", "cosine"] = "linear"
    """Form of wsd's fall."""
    final: Fraction = 0.1
    """Factor at the end."""


class MuonConfig(Section, drift="branch"):
    """Per-Head Muon for matrices (k3-facts 9.1)."""

    lr: PositiveFloat = 2e-3
    """Peak learning rate."""
    momentum: Fraction = 0.95
    """Decay of the momentum."""
    nesterov: bool = True
    """Orthogonalise gradient + momentum x new momentum, not the momentum alone."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices."""
    steps: Positive = 5
    """Newton-Schulz iterations."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the Newton-Schulz products."""
    per_head: Frozen[bool] = True
    """Orthogonalise each head's block of q, k, v (and MLA's up-projections) by itself."""


class AdamWConfig(Section, drift="branch"):
    """AdamW for embeddings, head, vectors and convolutions."""

    lr: PositiveFloat = 2e-3
    """Peak learning rate."""
    b1: Fraction = 0.9
    """Decay of the first moment."""
    b2: Fraction = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """On arrays that decay (matrices and tables); vectors never do."""


class BalanceConfig(Section, drift="branch"):
    """Router-bias update after every step."""

    kind: Frozen[Literal["quantile", "sign", "none"]] = "quantile"
    """The bias that levels the load exactly on this step's tokens, a fixed step towards it, or no balancing."""
    bins: Positive = 1000
    """Histogram bins of the quantile form."""
    rate: PositiveFloat = 1e-3
    """Step of the sign form."""
    ema: Fraction | None = None
    """Weight of the old bias in the new one (quantile form)."""


class GuardConfig(Section, drift="free"):
    """Bad steps: what counts as one, and what is done about it. A skipped step changes nothing but the step count."""

    nonfinite: Literal["skip", "halt"] = "skip"
    """Loss or gradient not finite: skip the step, or skip it and end with exit 40."""
    spikes: Literal["warn", "skip", "halt"] = "warn"
    """Loss or update norm far above its running mean: make the step and say so, skip it, or skip it and end."""
    loss_sigma: PositiveFloat | None = 6.0
    """Standard deviations above the running mean from which a loss is a spike; none looks for none."""
    update_sigma: PositiveFloat | None = 6.0
    """The same for the norm of each optimizer group's update."""
    window: Window = 128
    """Accepted steps that the running mean and variance look back on; also the span of ``max_in_window``."""
    warmup_steps: NonNegative = 100
    """Accepted steps before anything is called a spike."""
    max_in_a_row: Few = 4
    """Steps that may be skipped in a row; one more ends the run with exit 40."""
    max_in_window: Few = 12
    """Steps that may be skipped within ``window`` steps; one more ends the run with exit 40."""


class OptimConfig(Section, drift="branch"):
    """Which array is updated how."""

    schedule: ScheduleConfig = ScheduleConfig()
    matrices: Frozen[Literal["muon", "adamw"]] = "muon"
    """Optimizer of the matrices; everything else is AdamW's."""
    muon: MuonConfig = MuonConfig()
    adamw: AdamWConfig = AdamWConfig()
    clip_norm: PositiveFloat | None = 1.0
    """Global gradient norm above which all gradients are scaled down."""
    qk_clip: PositiveFloat | None = 100.0
    """Largest attention logit a head may reach before its query and key weights shrink (tau)."""
    balance: BalanceConfig = BalanceConfig()
    ema: Fraction | None = None
    """Decay of a moving average of the weights kept beside them; none keeps none."""
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _schedule_fits(self) -> "OptimConfig":
        s = self.schedule
        if s.kind == "wsd" and s.warmup + s.decay > 1:
            raise ValueError("schedule.warmup + schedule.decay must not exceed 1")
        return self
