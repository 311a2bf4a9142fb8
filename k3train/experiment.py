"""The experiment file: nests the rooms' sections and checks what concerns several of them. Imports no JAX."""

import os
from collections.abc import Iterator
from typing import NamedTuple

from pydantic import model_validator

from k3train.checkpoint.config import CheckpointConfig
from k3train.config.rules import Fault, RuleError
from k3train.config.section import Section
from k3train.data.config import DataConfig
from k3train.kernels.config import KernelsConfig
from k3train.metrics.config import MetricsConfig
from k3train.models.config import ModelConfig
from k3train.models.rules import model_faults
from k3train.optim.config import OptimConfig
from k3train.parallel.config import ROW_AXES, TOKEN_AXES, MeshConfig, MoonEPConfig
from k3train.run.config import RunConfig
from k3train.train.config import EvalConfig, SampleConfig, TrainConfig

BYTES_VOCABULARY = 259
"""Ids of the byte tokenizer: padding, beginning, end, and 256 bytes."""


def absolute(path: str) -> str:
    """``path`` from the root of the file system; an address such as ``gs://bucket/run`` stays as it is."""
    return path if "://" in path else os.path.abspath(path)  # noqa: PTH100 - Path keeps the ".." of a/../b


class Experiment(Section):
    """One run, whole."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    moonep: MoonEPConfig = MoonEPConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _rules(self) -> "Experiment":
        faults = [fault for rule in RULES for fault in rule(self)]
        if faults:
            raise RuleError(faults)
        return self

    def absolute(self) -> "Experiment":
        """The same with its files and folders written out from the working directory, so that they are found from
        any other. ``data.source.files`` stays as it is: a store remembers the patterns it was made from."""
        run, data = self.run, self.data
        place, at, step = run.resume.rpartition("@")
        updates = {
            "dir": absolute(run.dir),
            "resume": f"{absolute(place)}@{step}" if at else run.resume,
            "init_from": run.init_from and absolute(run.init_from),
        }
        tokenizer = data.tokenizer
        if tokenizer.path is not None:
            tokenizer = tokenizer.model_copy(update={"path": absolute(tokenizer.path)})
        stores = data.with_stores(absolute)
        return self.model_copy(
            update={
                "run": run.model_copy(update=updates),
                "data": stores.model_copy(update={"tokenizer": tokenizer}),
            }
        )


def model_rules(e: Experiment) -> Iterator[Fault]:
    """The model's own sections fit together."""
    yield from model_faults(e.model)


def vocabulary(e: Experiment) -> Iterator[Fault]:
    """Every id the tokenizer may give has a row in the embedding table."""
    if e.data.tokenizer.kind == "bytes" and e.model.vocab_size < BYTES_VOCABULARY:
        yield Fault(
            ("model.vocab_size", "data.tokenizer.kind"),
            f"the byte tokenizer has {BYTES_VOCABULARY} ids, the model {e.model.vocab_size}",
            f"set model.vocab_size to {BYTES_VOCABULARY} or more",
        )


class Shape(NamedTuple):
    """What a step takes somewhere in a run, and the keys that say so."""

    rows: int
    length: int
    accumulation: int
    rows_key: str
    length_key: str


def shapes(e: Experiment) -> list[Shape]:
    """The shapes of the run's steps; held-out rows have the first one's length."""
    keys = "train.global_batch", "data.sequence_length"
    found = [Shape(e.train.global_batch, e.data.sequence_length, e.train.accumulation, *keys)]
    for n, (stage, of) in enumerate(zip(e.train.curriculum, e.train.stages(e.data.sequence_length), strict=False)):
        own = [f"train.curriculum[{n}].{key}" for key in ("global_batch", "sequence_length")]
        rows_key = own[0] if stage.global_batch or stage.accumulation else keys[0]
        found.append(Shape(of.rows, of.length, of.accumulation, rows_key, own[1] if stage.sequence_length else keys[1]))
    return list(dict.fromkeys(found))


def lengths(e: Experiment) -> list[tuple[int, str]]:
    """Lengths of rows, and the key of each."""
    return list(dict.fromkeys((shape.length, shape.length_key) for shape in shapes(e)))


def _written(key: str) -> str:
    """The key whose place in the file is known: of a stage, its list's."""
    return key.partition("[")[0]


def stages_of_a_curriculum(e: Experiment) -> Iterator[Fault]:
    """Rows are cut into equal parts, and every stage has a step."""
    for n, stage in enumerate(e.train.curriculum):
        length = stage.sequence_length
        if length and e.data.sequence_length % length:
            yield Fault(
                ("train.curriculum", "data.sequence_length"),
                f"rows of {e.data.sequence_length} tokens cannot be cut into parts of {length}, as stage {n} says",
                "set a divisor of data.sequence_length, which is the longest a row can be",
            )
    for n, start, end in e.train.empty_stages(e.data.sequence_length):
        yield Fault(
            ("train.curriculum",),
            f"stage {n}, from {start:,} to {end:,} tokens, ends within the last step of the stage before it",
            "set them further apart, or leave the stage out",
        )


def sequence_and_chunk(e: Experiment) -> Iterator[Fault]:
    """A row holds at least one chunk of the chunked delta rule."""
    chunked = bool(e.model.layers.kda) and e.kernels.kda != "recurrent"
    for length, key in lengths(e):
        if chunked and length < e.kernels.kda_chunk:
            yield Fault(
                (_written(key), "kernels.kda_chunk"),
                f"rows of {length} tokens are shorter than a chunk of {e.kernels.kda_chunk}",
                f"lengthen the rows, or set kernels.kda_chunk to {length} or less",
            )


def batch_over_devices(e: Experiment) -> Iterator[Fault]:
    """Each microbatch splits evenly over the devices that share the batch (those known before the run starts)."""
    known, devices = e.mesh.known(ROW_AXES), e.mesh.ways(ROW_AXES)
    for shape in shapes(e):
        rows = shape.rows // shape.accumulation
        if rows % devices:
            yield Fault(
                (_written(shape.rows_key), "train.accumulation", *known),
                f"{shape.rows} rows in {shape.accumulation} microbatches are {rows} at a time, "
                f"which {devices} devices cannot share evenly",
                f"make {shape.rows_key} a multiple of {devices * shape.accumulation}, or change the others",
            )


def rows_over_context(e: Experiment) -> Iterator[Fault]:
    """Each row splits evenly over the devices that share its tokens; attention's work is evened out by halves."""
    halves = 2 if e.mesh.context > 1 else 1
    known, ways = e.mesh.known(TOKEN_AXES), e.mesh.ways(TOKEN_AXES)
    for length, key in lengths(e):
        own = length // e.mesh.context
        if length % (ways * halves):
            yield Fault(
                (_written(key), *known),
                f"{length} tokens do not go into {ways * halves} equal parts "
                f"({ways} devices{', two halves each' * (halves > 1)})",
                f"make {key} a multiple of {ways * halves}, or change the others",
            )
        elif e.mesh.context > 1 and e.model.kda and own < e.model.kda.conv_size - 1:
            yield Fault(
                (_written(key), "mesh.context", "model.kda.conv_size"),
                f"a device's {own} tokens are fewer than the {e.model.kda.conv_size - 1} that the short convolution "
                "looks back",
                "lengthen the rows, or set a smaller mesh.context",
            )
    if e.mesh.context > 1 and e.model.layers.kda and e.kernels.kda == "recurrent":
        yield Fault(
            ("kernels.kda", "mesh.context"),
            "the recurrent form takes a row token by token, so devices cannot share it",
            "set kernels.kda: chunked",
        )


def model_over_tensor(e: Experiment) -> Iterator[Fault]:
    """Heads and feed-forward widths split evenly."""
    ways, model = e.mesh.tensor, e.model
    sizes = {
        "model.kda.num_heads": model.kda.num_heads if model.kda else 0,
        "model.mla.num_heads": model.mla.num_heads if model.mla else 0,
        "model.ffn.intermediate_size": model.ffn.intermediate_size if model.ffn else 0,
        "model.moe.intermediate_size": model.moe.num_shared * model.moe.intermediate_size if model.moe else 0,
    }
    for key, size in sizes.items():
        if ways > 1 and size % ways:
            what = f"{size} {'heads' if 'heads' in key else 'columns of the feed-forward network'}"
            yield Fault((key, "mesh.tensor"), f"{what} do not divide over {ways} devices", "set a smaller mesh.tensor")


def experts_over_devices(e: Experiment) -> Iterator[Fault]:
    """Experts split evenly over their axis, if there are any."""
    if e.mesh.expert > 1 and e.model.moe is None:
        yield Fault(("mesh.expert",), "this model has no experts", "give the devices to mesh.fsdp")
    elif e.mesh.expert > 1 and e.model.moe and e.model.moe.num_experts % e.mesh.expert:
        yield Fault(
            ("model.moe.num_experts", "mesh.expert"),
            f"{e.model.moe.num_experts} experts do not divide over {e.mesh.expert} devices",
            "set mesh.expert to a divisor",
        )


def hidden_over_fsdp(e: Experiment) -> Iterator[Fault]:
    """Parameters are cut along the hidden width."""
    if e.mesh.fsdp > 1 and e.model.hidden_size % e.mesh.fsdp:
        yield Fault(
            ("mesh.fsdp", "model.hidden_size"),
            f"a hidden width of {e.model.hidden_size} does not divide over {e.mesh.fsdp} shards",
            "set mesh.fsdp to a divisor of model.hidden_size, and give the other devices to mesh.replica",
        )


def budget(e: Experiment) -> Iterator[Fault]:
    """The token budget holds at least one step."""
    first = e.train.stages(e.data.sequence_length)[0]
    step = first.rows * first.length
    if e.train.tokens is not None and e.train.tokens < step:
        yield Fault(
            ("train.tokens", "train.global_batch", "data.sequence_length"),
            f"{e.train.tokens:,} tokens are less than one step of {step:,}",
            f"give at least {step:,} tokens, or a smaller batch",
        )


def balancing(e: Experiment) -> Iterator[Fault]:
    """Quantile balancing needs a cut-off: the best score that was not chosen."""
    moe = e.model.moe
    if moe is not None and e.optim.balance.kind == "quantile" and moe.top_k == moe.num_experts:
        yield Fault(
            ("model.moe.top_k", "model.moe.num_experts", "optim.balance.kind"),
            f"all {moe.num_experts} experts serve every token, so there is nothing to balance",
            "set optim.balance.kind: none, or a smaller top_k",
        )


def held_out(e: Experiment) -> Iterator[Fault]:
    """Evaluation needs documents that are held out, and training some that are not."""
    if e.eval.every and not e.data.holdout:
        yield Fault(
            ("eval.every", "data.holdout"),
            "no document is held out to evaluate on",
            "set data.holdout above 0 (0.01 holds out one in a hundred), or eval.every: 0",
        )
    if e.data.holdout == 1:
        yield Fault(("data.holdout",), "every document is held out, none is left to train on", "set it below 1")


def samples(e: Experiment) -> Iterator[Fault]:
    """Samples need prompts, and numbers a sampler can use."""
    if e.sample.every and not e.sample.prompts:
        yield Fault(
            ("sample.every", "sample.prompts"),
            "there is no prompt to go on from",
            "give sample.prompts a list of texts, or set sample.every: 0",
        )
    if not 0 < e.sample.top_p <= 1:
        yield Fault(("sample.top_p",), f"{e.sample.top_p} is no probability", "set it in (0, 1]; 1 keeps every token")
    if e.sample.temperature < 0:
        yield Fault(
            ("sample.temperature",), f"{e.sample.temperature} is negative", "set 0 (the likeliest token) or more"
        )


def start(e: Experiment) -> Iterator[Fault]:
    """The run starts from one place."""
    path, _, step = e.run.resume.rpartition("@")
    if e.run.resume not in ("auto", "must", "never") and not (path and step.isdigit()):
        yield Fault(
            ("run.resume",),
            f"{e.run.resume!r} is no way to resume",
            "write auto, must, never, or PATH@STEP (runs/other@1000)",
        )
    elif e.run.init_from is not None and e.run.resume not in ("auto", "never"):
        yield Fault(
            ("run.init_from", "run.resume"),
            "both say what the run begins with",
            "drop run.init_from, or set run.resume to auto or never",
        )


def moments(e: Experiment) -> Iterator[Fault]:
    """A moving average with decay 1 never moves."""
    o = e.optim
    for key, value in (
        ("muon.momentum", o.muon.momentum),
        ("adamw.b1", o.adamw.b1),
        ("adamw.b2", o.adamw.b2),
        ("ema", o.ema),
        ("balance.ema", o.balance.ema),
    ):
        if value == 1:
            yield Fault((f"optim.{key}",), "with decay 1 the average never moves", "set it below 1")


def intervals(e: Experiment) -> Iterator[Fault]:
    """Times and spans are what they are meant to be."""
    span = e.metrics.profile_steps
    if span and (len(span) != 2 or not 0 <= span[0] <= span[1]):
        yield Fault(
            ("metrics.profile_steps",),
            f"{list(span)} is no span of steps",
            "give the first and the last step, as in [10, 12]",
        )


RULES = (
    model_rules,
    vocabulary,
    stages_of_a_curriculum,
    sequence_and_chunk,
    batch_over_devices,
    rows_over_context,
    model_over_tensor,
    experts_over_devices,
    hidden_over_fsdp,
    budget,
    balancing,
    held_out,
    samples,
    start,
    moments,
    intervals,
)
