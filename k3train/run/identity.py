"""What a run folder stands for, and the message when an experiment asks for something else. Imports no JAX.

Frozen and branch keys (``config/drift.py``) are the run's identity, and so are the content of its token store and its
tokenizer, which the trainer claims once they are open.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from k3train.config.drift import ABSENT, Change
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.section import Drift

STORE_KEY = "data.content"
"""The store's content hash among what the trainer claims."""
TOKENIZER_KEY = "data.tokenizer.fingerprint"
"""The tokenizer's fingerprint among it."""
_WIDTH = 60  # characters of a value in a message


def store_key(source: str) -> str:
    """``STORE_KEY`` of a source; of one without a name it is the bare key."""
    return f"{STORE_KEY}.{source}" if source else STORE_KEY


class Parent(NamedTuple):
    """The run whose state another one began with.

    Attributes:
      folder: its run folder.
      run_id: its id; None where no record lies beside its checkpoints.
      step: the step whose state was taken over.
      changes: the keys that the new run has otherwise.
      claimed: what the trainer claimed for it (the store's content hash), which stays so.
    """

    folder: str
    run_id: str | None
    step: int
    changes: list[Change]
    claimed: dict[str, Any]


class DriftRefused(UserError):
    """An experiment that differs where a run must not change (exit 33).

    Attributes:
      branchable: whether a branch would be allowed to differ so.
    """

    def __init__(self, message: str, branchable: bool):
        super().__init__(message, ExitCode.RUN_FOLDER)
        self.branchable = branchable


def refuse(folder: object, changes: Sequence[Change], branching: bool = False) -> None:
    """Refuse an experiment that changes what it may not; nothing has been touched yet.

    Args:
      folder: the run that ``changes`` differ from.
      changes: all of them; free ones are let through.
      branching: whether the experiment has a folder of its own, where branch keys may differ.

    Raises:
      DriftRefused: frozen keys differ, or branch keys without a branch; lists each with both values.
    """
    frozen = [change for change in changes if change.drift == Drift.FROZEN]
    branch = [] if branching else [change for change in changes if change.drift == Drift.BRANCH]
    if not (frozen or branch):
        return
    lines = [f"{folder} holds another experiment; nothing was touched."]
    if frozen:
        lines += ["These keys are frozen and differ:", *map(_line, frozen)]
    if branch:
        lines += ["These keys may differ on a branch only:", *map(_line, branch)]
    if frozen:
        lines.append("Choose another run.dir, or set these keys back to go on with the run that is there.")
    else:
        lines.append("Set these keys back to go on with the run that is there, or branch off from it.")
    raise DriftRefused("\n".join(lines), branchable=not frozen)


def render(changes: Sequence[Change], title: str) -> Table:
    """The changes as a table: key, before, now, class."""
    table = Table(title=title)
    for name in ("key", "was", "now", "class"):
        table.add_column(name, overflow="fold")  # long values often differ at their end
    for change in changes:
        table.add_row(change.key, short(change.was), short(change.now), change.drift)
    return table


def short(value: Any) -> str:
    """A value as JSON on one short line."""
    text = value if value == ABSENT else json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _line(change: Change) -> str:
    return f"  {change.key}: was {short(change.was)}, now {short(change.now)}"
