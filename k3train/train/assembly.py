"""Everything a run is made of, put together once from its experiment."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from k3train.config.errors import UserError
from k3train.data.course import Course, Leg
from k3train.data.prepare import ensure_stores
from k3train.data.stores import Stores
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.experiment import Experiment
from k3train.kernels.resolve import Place, resolve
from k3train.models.counts import flops_per_token
from k3train.models.decoder import Decoder
from k3train.optim.optimizer import Optimizer
from k3train.parallel import coordination, distributed
from k3train.parallel.axes import batch_sharding, refuse_replicated, sharding_report
from k3train.parallel.config import ROW_AXES
from k3train.parallel.distributed import Feed
from k3train.parallel.mesh import build_mesh
from k3train.parallel.moonep.config import Options
from k3train.train.state import StateFactory


@dataclass(frozen=True, eq=False)  # the same parts are the same object
class Assembly:
    """The parts of one run.

    Attributes:
      exp: the experiment, with every kernel named.
      kernels: rows (op, implementation, why) of the kernel table.
      course: rows of each step, from where the run begins or goes on.
      steps: optimizer steps of the whole run.
      total_tokens: nominal tokens of the whole run, where the schedule ends.
    """

    exp: Experiment
    kernels: list[tuple[str, str, str]]
    mesh: Mesh
    decoder: Decoder
    optimizer: Optimizer
    factory: StateFactory
    tokenizer: Tokenizer
    course: Course
    steps: int
    total_tokens: int

    def feed(self, rows: int, length: int | None = None) -> Feed:
        """What brings batches of so many rows onto the mesh; rows are whole ones by default."""
        return Feed(batch_sharding(self.mesh), rows, length or self.exp.data.sequence_length)

    def going_on(self, step: int, position: int, tokens: int) -> "Assembly":
        """For a run that has done ``step`` steps over ``tokens`` nominal tokens: its course, its end, its schedule.

        Only where those steps had another batch does it end elsewhere than a run that begins anew.

        Args:
          position: where its data goes on (``data/course.py``).
        """
        train = self.exp.train
        course = Course(self.course.stages, step, position, tokens)
        steps = train.steps or max(step, course.steps_to(train.tokens or 0))
        return replace(self, course=course, steps=steps, total_tokens=course.tokens(max(steps, step)))

    def shaped(self, leg: Leg) -> "Assembly":
        """For steps of one leg: the experiment says what they take."""
        train = {"global_batch": leg.rows, "accumulation": leg.accumulation, "curriculum": ()}
        exp = self.exp.model_copy(
            update={
                "train": self.exp.train.model_copy(update=train),
                "data": self.exp.data.model_copy(update={"sequence_length": leg.length}),
            }
        )
        return replace(self, exp=exp)

    def flops(self, length: int) -> float:
        """Model FLOPs of the forward and backward pass of one token in a row of ``length`` tokens."""
        return flops_per_token(self.exp.model, length, self.exp.kernels.kda_chunk).training

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of activations and of the weights' working copy."""
        return jnp.dtype(self.exp.train.compute_dtype)


def assemble(exp: Experiment, mesh: Mesh | None = None) -> Assembly:
    """Builds mesh, model and optimizer; allocates no weights.

    Args:
      mesh: where it runs; by default what ``exp.mesh`` makes of all devices there are.

    Raises:
      UserError: where the mesh does not fit the devices or the batch, these do not run a kernel that is asked for, or
        (exit 32) the mesh leaves a large array whole.
    """
    mesh = build_mesh(exp.mesh) if mesh is None else mesh
    width = exp.model.kda.head_dim if exp.model.kda else None
    device = mesh.devices.flat[0]
    mla = exp.model.mla
    place = Place(
        device.platform,
        device.device_kind,
        width,
        exp.train.compute_dtype,
        mesh.shape["context"],
        (mla.qk_nope_head_dim, mla.qk_shared_head_dim, mla.v_head_dim) if mla else None,
    )
    kernels, table = resolve(exp.kernels, place)
    exp = exp.model_copy(update={"kernels": kernels})
    course = Course(exp.train.stages(exp.data.sequence_length))
    ways = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    for stage in course.stages:
        if (rows := stage.rows // stage.accumulation) % ways:
            raise UserError(
                f"train.global_batch {stage.rows} / train.accumulation {stage.accumulation} = "
                f"{rows} rows do not divide over the mesh's {ways} shares of a batch; change one of these or mesh"
            )
    decoder = decoder_of(exp, exp.moonep.options)
    optimizer = Optimizer(exp.optim, decoder.specs())
    steps = exp.train.steps or course.steps_to(exp.train.tokens or 0)
    factory = StateFactory(decoder, optimizer, mesh, ema=exp.optim.ema is not None)
    report = sharding_report(mesh, factory.abstract["params"], decoder.specs())
    refuse_replicated(report, exp.mesh.replicated_limit_mib)
    return Assembly(
        exp=exp,
        kernels=table,
        mesh=mesh,
        decoder=decoder,
        optimizer=optimizer,
        factory=factory,
        tokenizer=load_tokenizer(exp.data.tokenizer),
        course=course,
        steps=steps,
        total_tokens=course.tokens(steps),
    )


def decoder_of(exp: Experiment, moonep: Options) -> Decoder:
    """The experiment's model, its kernels named already, with experts that travel as ``moonep`` says."""
    bins = exp.optim.balance.bins if exp.optim.balance.kind == "quantile" else 0
    return Decoder(exp.model, exp.kernels, remat=exp.train.remat, balance_bins=bins, moonep=moonep)


def open_data(exp: Experiment, say: Callable[[str], None]) -> Stores:
    """The run's token stores, prepared by process 0 where they are absent; a progress bar shows the preparation."""
    from k3train.data.progress import ReadingBar

    def wait() -> None:
        coordination.barrier("data")

    leader = distributed.process_index() == 0
    with ReadingBar() as bar:
        return ensure_stores(
            exp.data, is_leader=leader, barrier=wait, vocab_size=exp.model.vocab_size, say=say, progress=bar.update
        )
