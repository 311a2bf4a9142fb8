"""The experiment file: nests the rooms' sections and checks what concerns several of them. Imports no JAX."""

from k3train.checkpoint.config import CheckpointConfig
from k3train.config.section import Section
from k3train.data.config import DataConfig
from k3train.kernels.config import KernelsConfig
from k3train.metrics.config import MetricsConfig
from k3train.models.config import ModelConfig
from k3train.optim.config import OptimConfig
from k3train.parallel.config import MeshConfig
from k3train.run.config import RunConfig
from k3train.train.config import EvalConfig, SampleConfig, TrainConfig


class Experiment(Section):
    """One run, whole."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    mesh: MeshConfig = MeshConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    sample: SampleConfig = SampleConfig()
    metrics: MetricsConfig = MetricsConfig()
