"""Every metric a run reports: name, unit, reduction, meaning. ``docs/metrics.md`` is made from this table.

``python -m k3train.metrics.names`` prints the page. Imports no JAX.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, or a family of them where the name holds ``<...>``."""

    name: str
    unit: str
    reduction: str
    """How values of tokens, layers or devices become one."""
    meaning: str
    worst: str = ""
    """What ``<name>_worst`` is, where it is reported beside the mean; empty where it is not."""


COLUMNS = (
    ("step", "optimizer steps done"),
    ("samples", "whole rows read since the start of the run"),
    ("tokens", "nominal tokens (rows x length) since the start of the run"),
    ("time", "wall clock, seconds since 1970"),
    ("attempt", "number of the start of the run that wrote the line (attempts.jsonl)"),
    ("nonfinite", 'only where needed: names whose value is null because it was "nan", "inf" or "-inf"'),
)

_TOKENS = "mean over supervised tokens of the global batch"
_LAYERS = "mean over layers"

METRICS = (
    Metric("train/loss", "nats/token", _TOKENS, "cross-entropy of the next token, without auxiliary terms"),
    Metric(
        "train/loss_ema", "nats/token", "mean over optim.guard.window", "running mean of accepted steps, bias-corrected"
    ),
    Metric("train/accuracy", "", _TOKENS, "share of tokens whose likeliest prediction is right"),
    Metric("train/perplexity", "", "exp of train/loss", "exponential of the loss"),
    Metric("train/mtp_loss", "nats/token", _TOKENS, "cross-entropy of the multi-token-prediction layer"),
    Metric("train/z_loss", "nats^2/token", _TOKENS, "weighted squared log-partition of the output"),
    Metric("train/supervised_tokens", "tokens", "sum over the global batch", "targets that entered the loss"),
    Metric("train/lr/<group>", "", "", "learning rate of the optimizer group at this step"),
    Metric("train/grad_norm", "", "global L2 norm", "gradient norm before clipping"),
    Metric("train/grad_norm_clipped", "", "global L2 norm", "gradient norm after clipping"),
    Metric("train/grad_norm/<group>", "", "L2 norm of the group", "gradient norm of one optimizer group, unclipped"),
    Metric("train/param_norm", "", "global L2 norm", "norm of the master weights after the step"),
    Metric("train/update_norm/<group>", "", "L2 norm of the group", "change of weights that the step asks for"),
    Metric("train/update_rms/<group>", "", "root mean square of the group", "typical change of one weight"),
    Metric("train/nonfinite", "0 or 1", "any", "loss or gradient was not finite"),
    Metric("train/spike", "0 or 1", "any", "loss or an update norm was far above its running mean (optim.guard)"),
    Metric("train/skipped", "0 or 1", "any", "the step changed no weights"),
    Metric("guard/loss_deviation", "sigma", "", "standard deviations of train/loss above its running mean"),
    Metric("guard/update_deviation/<group>", "sigma", "", "the same for train/update_norm of an optimizer group"),
    Metric("guard/skipped_in_a_row", "steps", "", "steps skipped in a row up to this one"),
    Metric("guard/skipped_in_window", "steps", "", "steps skipped within the last optim.guard.window"),
    Metric("eval/<set>/loss", "nats/token", "mean over supervised tokens of the set", "holdout: all held-out text"),
    Metric("eval/<set>/bpb", "bits/byte", "total bits over total bytes of text", "comparable between tokenizers"),
    Metric("eval/<set>/tokens", "tokens", "sum", "supervised tokens; holdout-NAME: of one of several sources"),
    Metric("moe/maxvio", "", _LAYERS, "(largest - mean) / mean expert load; 0 is perfect balance", "largest layer"),
    Metric("moe/load_min", "of mean load", _LAYERS, "load of the idlest expert", "smallest layer"),
    Metric("moe/load_p95", "of mean load", _LAYERS, "95th percentile of expert load", "largest layer"),
    Metric("moe/dead_experts", "experts", "sum over layers", "experts that no token chose", "largest layer"),
    Metric("moe/router_entropy", "nats", _LAYERS, "entropy of normalised router scores", "smallest layer"),
    Metric("moe/bias_absmax", "", _LAYERS, "largest absolute router bias; 0 for ever: no balancing", "largest layer"),
    Metric("moe/rank_load", "of mean load", _LAYERS, "fullest device before MoonEP levels", "largest layer"),
    Metric("moe/redundant", "experts", _LAYERS, "most experts of others that a device computes", "largest layer"),
    Metric("moe/rounds", "", _LAYERS, "rounds of moonep.redundant_slots that the fullest device took", "largest layer"),
    Metric("attn/max_logit", "", "largest over layers and heads", "largest scaled attention logit of MLA"),
    Metric("attn/qk_clip_heads", "heads", "sum over layers", "heads whose query and key weights QK-Clip shrank"),
    Metric("attn/qk_clip_min_gamma", "", "smallest over layers and heads", "strongest factor QK-Clip applied"),
    Metric("kda/decay_mean", "", _LAYERS, "mean decay factor of the state"),
    Metric("kda/decay_min", "", _LAYERS, "smallest decay factor of the state", "smallest layer"),
    Metric("kda/beta_mean", "", _LAYERS, "mean write strength"),
    Metric("kda/state_rms", "", _LAYERS, "root mean square of the final state", "largest layer"),
    Metric("attnres/entropy", "nats", "mean over sub-layers", "entropy of the depth weights", "smallest sub-layer"),
    Metric("attnres/weight_max", "", "mean over sub-layers", "largest depth weight of a token", "largest sub-layer"),
    Metric("perf/step_s", "s", "mean since the last line", "wall time of a step, all included but what is named below"),
    Metric("perf/data_wait_s", "s", "mean since the last line", "waiting for a batch"),
    Metric("perf/compile_s", "s", "", "compiling the step, once an attempt"),
    Metric("perf/save_block_s", "s", "", "a save's share that held the training up"),
    Metric("perf/goodput", "", "since the first start", "share of the time that went into steps which still count"),
    Metric("ckpt/failures", "saves", "", "saves in a row that failed; checkpoint.max_failures ends the run"),
    Metric("perf/eval_s", "s", "", "wall time of an evaluation"),
    Metric("perf/tokens_per_s", "tokens/s", "all devices", "nominal tokens over step time"),
    Metric("perf/tokens_per_s_device", "tokens/s", "per device", "the same over the number of devices"),
    Metric("perf/mfu", "", "all devices", "model FLOPs (active experts, causal half) over peak; null where unknown"),
    Metric("perf/hbm_peak_gib", "GiB", "largest local device", "peak device memory; null where not reported"),
    Metric("perf/host_rss_gib", "GiB", "this process", "resident host memory"),
    Metric("data/batch_hash", "hex", "ids and documents of the global batch", "equal on any mesh and after any resume"),
    Metric("data/epoch", "", "", "passes over the training rows so far, those of all sources together"),
    Metric("data/epoch/<source>", "", "", "passes over the rows of one of several sources"),
    Metric("data/pad_frac", "", "mean over the global batch", "share of padding among the tokens"),
    Metric("data/docs_per_row", "", "mean over the global batch", "documents in a row"),
)

WORST = "_worst"


def find(name: str) -> Metric | None:
    """The metric of a reported name (``train/lr/muon``, ``moe/maxvio_worst``); None where the table has none."""
    for metric in METRICS:
        if _matches(metric.name, name) or (metric.worst and name == metric.name + WORST):
            return metric
    return None


def _matches(pattern: str, name: str) -> bool:
    wanted, given = pattern.split("/"), name.split("/")
    return len(wanted) == len(given) and all(w == g or (w[:1] == "<" and g) for w, g in zip(wanted, given, strict=True))


def page() -> str:
    """``docs/metrics.md``."""
    lines = [
        "# Metrics",
        "",
        "A run writes one JSON object a line to `metrics.jsonl`. This page is made from the table in",
        "`k3train/metrics/names.py` by `python -m k3train.metrics.names`; a test keeps the two equal.",
        "",
        "Every line has these columns:",
        "",
        "| column | meaning |",
        "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in COLUMNS),
        "",
        "When a run goes on from step s, lines of later steps are moved to `metrics.jsonl.attempt-N`, N being the",
        "attempt that wrote them. Where a metric has a worst value, `<name>_worst` is reported beside it.",
        "",
        "| name | unit | reduction | meaning | worst |",
        "|---|---|---|---|---|",
        *(f"| `{m.name}` | {m.unit} | {m.reduction} | {m.meaning} | {m.worst} |" for m in METRICS),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
