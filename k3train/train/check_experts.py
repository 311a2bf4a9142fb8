"""The experts that travel against experts that do not, on one batch of a run (``moonep.check``)."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.batch import Batch
from k3train.models.decoder import Decoder
from k3train.models.param import compute_copy
from k3train.parallel.trees import flatten, name
from k3train.train.assembly import Assembly, decoder_of
from k3train.train.state import State
from k3train.train.step import gradients

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2}
"""Norm of the difference over the norm, of each array's gradient and of the loss, by compute dtype."""


def check_experts(parts: Assembly, state: State, batch: Batch, say: Callable[[str], None]) -> float:
    """Computes loss and gradients both ways; every device needs room for all experts of a layer.

    Args:
      parts, state: of the run, its mesh set.
      batch: global.
      say: hears that it compiles, and the largest difference.

    Returns:
      Seconds that it took.

    Raises:
      UserError: exit 1 where they differ by more than rounding.
    """
    say("moonep.check: compiling the gradients of the first batch both ways")
    began = time.monotonic()
    worst = jax.device_get(jax.jit(lambda s, b: _differences(parts, s, b))(state, batch))
    where = max(worst, key=lambda path: worst[path])
    tolerance = TOLERANCE[parts.exp.train.compute_dtype]
    line = f"experts over {parts.mesh.shape['expert']} devices against all on each: largest relative difference "
    line += f"{worst[where]:.1e} ({where}), allowed {tolerance:.0e}"
    if not worst[where] <= tolerance:
        raise UserError(f"{line}: the experts' tokens do not arrive as they should; please report it", ExitCode.BUG)
    say(line)
    return time.monotonic() - began


def _differences(parts: Assembly, state: State, batch: Batch) -> dict[str, jax.Array]:
    """Relative differences by name of the array, and of the loss."""
    exp = parts.exp
    other = decoder_of(exp, exp.moonep.options._replace(everywhere=True))
    params = compute_copy(state["params"], parts.decoder.specs(), parts.compute_dtype)

    def run(decoder: Decoder) -> dict[str, Any]:
        grads, stats = gradients(decoder, exp, params, state["buffers"], batch)
        return {name(path): gradient for path, gradient in flatten(grads).items()} | {"loss": stats["loss"]}

    got, want = run(parts.decoder), run(other)
    return {
        key: optax.tree.norm(got[key] - want[key]) / jnp.maximum(optax.tree.norm(want[key]), jnp.float32(1e-20))
        for key in want
    }
