"""Everything a run is made of, put together once from its experiment."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from k3train.config.errors import UserError
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
      steps: optimizer steps of the whole run.
      step_tokens: nominal tokens (rows x length) of one step.
      total_tokens: nominal tokens of the whole run, where the schedule ends.
      flops: model FLOPs of one token's forward and backward pass.
    """

    exp: Experiment
    kernels: list[tuple[str, str, str]]
    mesh: Mesh
    decoder: Decoder
    optimizer: Optimizer
    factory: StateFactory
    tokenizer: Tokenizer
    steps: int
    step_tokens: int
    total_tokens: int
    flops: float

    def feed(self, rows: int) -> Feed:
        """What brings batches of so many rows onto the mesh."""
        return Feed(batch_sharding(self.mesh), rows, self.exp.data.sequence_length)

    def going_on(self, step: int, tokens: int) -> "Assembly":
        """For a run that has done ``step`` steps over ``tokens`` nominal tokens: where it ends, and its schedule.

        Only where those steps had another batch does it end elsewhere than a run that begins anew.
        """
        budget = self.exp.train.tokens
        left = self.steps - step if budget is None else math.ceil(max(0, budget - tokens) / self.step_tokens)
        return replace(self, steps=step + left, total_tokens=tokens + left * self.step_tokens)

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
    rows = exp.train.global_batch // exp.train.accumulation
    ways = math.prod(mesh.shape[axis] for axis in ROW_AXES)
    if rows % ways:
        raise UserError(
            f"train.global_batch {exp.train.global_batch} / train.accumulation {exp.train.accumulation} = "
            f"{rows} rows do not divide over the mesh's {ways} shares of a batch; change one of these or mesh"
        )
    decoder = decoder_of(exp, exp.moonep.options)
    optimizer = Optimizer(exp.optim, decoder.specs())
    step_tokens = exp.train.global_batch * exp.data.sequence_length
    steps = exp.train.steps or math.ceil((exp.train.tokens or 0) / step_tokens)
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
        step_tokens=step_tokens,
        steps=steps,
        total_tokens=steps * step_tokens,
        flops=flops_per_token(exp.model, exp.data.sequence_length, kernels.kda_chunk).training,
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
