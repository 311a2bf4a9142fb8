"""Which implementation serves each op, and block sizes. Imports no JAX."""

from typing import Literal

from pydantic import model_validator

from k3train.config.section import Positive, Section

KDA_KERNELS = {"mosaic_gpu": "gpu", "mosaic_tpu": "tpu"}
"""Kernels of the delta rule, and the devices each runs on."""
KDA_KERNEL_WIDTH = 128
"""Width of the keys and values that they serve."""
KDA_KERNEL_CHUNK = 64
"""Tokens in their chunks."""

ATTENTION_KERNELS = {"mosaic_gpu": "gpu"}
"""Kernels of MLA's attention, and the devices each runs on."""
ATTENTION_KERNEL_WIDTHS = (128, 64, 128)
"""Channels of keys of a head's own and shared, and of values, that they serve."""


class KernelsConfig(Section, drift="free"):
    """One named implementation an op; ``auto`` is resolved once at start and printed."""

    kda: Literal["auto", "mosaic_gpu", "mosaic_tpu", "chunked", "recurrent"] = "auto"
    """The delta rule: our kernels for Hopper GPUs (bfloat16, rows not shared out by mesh.context) or TPUs, for heads of
    width 128 (what they do not serve is computed by the chunked form, and the table at the start says so); the chunked
    form in plain JAX; or token by token."""
    kda_chunk: Positive = 64
    """Tokens in a chunk of the chunked delta rule; the kernels have 64."""
    attention: Literal["auto", "mosaic_gpu", "blockwise", "reference"] = "auto"
    """MLA's softmax attention: our kernels for Hopper GPUs, for bfloat16, rows not shared out by mesh.context and heads
    of 128 + 64 key and 128 value channels (what they do not serve is computed by the blockwise form, and the table at
    the start says so); or plain JAX, which auto takes everywhere."""
    attention_block: Positive = 512
    """Query rows scored at a time by the blockwise form."""
    grouped_matmul: Literal["auto", "blocked", "reference"] = "auto"
    """The routed experts' matrix products."""
    grouped_matmul_block: Positive = 128
    """Rows in a block of the blocked form; each expert's group is padded to a multiple."""
    cross_entropy: Literal["auto", "chunked", "reference"] = "auto"
    """The loss from hidden states."""
    cross_entropy_chunk: Positive = 8192
    """Vocabulary entries scored at a time by the chunked form."""

    @model_validator(mode="after")
    def _chunk_is_a_power_of_two(self) -> "KernelsConfig":
        if self.kda_chunk & (self.kda_chunk - 1):
            raise ValueError(f"kda_chunk {self.kda_chunk} is not a power of two; 64 is the usual choice")
        return self
