"""What makes two runs the same experiment, and the message when they are not. Imports no JAX.

Identity is what the arrays and the order of the data depend on. Batch size, learning rates, mesh, kernels and
reporting are not part of it: a run may go on with others. The tokenizer counts by its kind here and by its fingerprint
through the store's content hash, which the trainer claims once the store is open; its path may differ by machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

STORE_KEY = "data.content"
"""The store's content hash among the identity's keys."""

_PREFIXES = ("model.",)
_KEYS = (
    "data.tokenizer.kind",
    "data.sequence_length",
    "data.holdout",
    "data.shuffle_seed",
    "data.add_bos",
    "data.add_eos",
    "optim.matrices",
    "run.seed",
)
_WIDTH = 60  # characters of a value in the message


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model.kda.heads": 4, ...}`` of nested mappings; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The identity's dotted keys and values out of a resolved config (``Experiment.model_dump()``)."""
    return {key: value for key, value in flatten(config).items() if key in _KEYS or key.startswith(_PREFIXES)}


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list]:
    """``{key: [old value, new value]}`` where two flat mappings differ; an absent key reads ``(absent)``."""
    keys = [*old, *(key for key in new if key not in old)]
    pairs = {key: [old.get(key, "(absent)"), new.get(key, "(absent)")] for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def refuse_changed(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Compare a folder's identity with the present one.

    Raises:
      UserError: they differ (exit 33); lists the keys with both values.
    """
    differing = changed(old, new)
    if differing:
        lines = [f"  {key}: was {_short(was)}, now {_short(now)}" for key, (was, now) in differing.items()]
        raise UserError(
            f"{folder} holds another experiment; nothing was touched. These keys differ:\n"
            + "\n".join(lines)
            + "\nChoose another run.dir, or set these keys back to go on with the run that is there.",
            ExitCode.RUN_FOLDER,
        )


def _short(value: Any) -> str:
    text = value if value == "(absent)" else json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
