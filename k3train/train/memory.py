"""A device that ran out of memory, said so that the user can mend it."""

import re

import jax

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.experiment import Experiment


def out_of_memory(error: BaseException, exp: Experiment) -> UserError | None:
    """The message (exit 32) where ``error`` is the runtime's refusal of device memory; None for any other error."""
    text = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or "RESOURCE_EXHAUSTED" not in text:
        return None
    wanted = re.search(r"allocat\w+ ([\d.]+ ?[KMGT]?i?B|\d+ bytes)", text)
    train = exp.train
    cures = [f"train.accumulation above {train.accumulation}, or train.global_batch below {train.global_batch}"]
    cures += ["train.remat: full"] if train.remat != "full" else []
    cures += [f"data.sequence_length below {exp.data.sequence_length}", "more devices along mesh.fsdp"]
    return UserError(
        f"the device has too little memory for this run{f' (asked for {wanted[1]} more)' if wanted else ''}; "
        f"nothing that was saved is lost. Cures: {'; '.join(cures)}. docs/performance.md says what takes memory",
        ExitCode.PLAN,
    )
