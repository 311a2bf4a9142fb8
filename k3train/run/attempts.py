"""``attempts.jsonl``: what each attempt left of itself, as far as it can be believed. Imports no JAX."""

import json
from pathlib import Path
from typing import Any

from k3train.config.storage import storage

ATTEMPTS = "attempts.jsonl"
_NUMBER, _STEP, _SPENT = (int, float), (int, type(None)), (dict, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "attempt": (int,), "time": _NUMBER, "began": _NUMBER, "resumed_step": _STEP, "step": _STEP, "seconds": _SPENT,
    "changes": (dict,),
}  # fmt: skip


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """The readable lines of attempts.jsonl, oldest first; torn ones, and such as no run wrote, are passed over.

    Raises:
      UserError: the file is there and cannot be read (exit 33).
    """
    file = Path(path) / ATTEMPTS
    if not file.exists():
        return []
    with storage(file, "read"):
        texts = file.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and _believable(line):
            lines.append(line)
    return lines


def _believable(line: dict[str, Any]) -> bool:
    """Whether an attempt's line has what its readers count on."""
    event = line.get("event")
    needed = {"start": ("attempt", "time"), "end": ("attempt",), "lost": ("attempt",)}
    kinds = all(isinstance(line[key], kind) for key, kind in _KINDS.items() if line.get(key) is not None)
    return isinstance(event, str) and kinds and all(line.get(key) is not None for key in needed.get(event, ()))
