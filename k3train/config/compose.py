"""Puts an experiment together: ``extends``, deep merge, dotted overrides. Imports no JAX.

Maps merge key by key; lists, scalars and null replace what they meet.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.yaml_reader import Node, read_file, read_text

COMMAND_LINE = "command line"


def compose(path: str | Path, overrides: Sequence[str] = ()) -> Node:
    """The file with everything it extends beneath it and the overrides on top.

    Args:
      path: the experiment file.
      overrides: ``dotted.key=value`` texts; values are YAML (scalars, [lists], {maps}), empty is null.

    Raises:
      UserError: for unreadable files, cycles of ``extends``, and malformed overrides.
    """
    root = _load(Path(path), ())
    for text in overrides:
        root = merge(root, _override(text, root))
    return root


def merge(below: Node, above: Node) -> Node:
    """``above`` laid over ``below``; the origin of a merged map is that of the upper one."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    out = dict(below.value)
    for key, node in above.value.items():
        out[key] = merge(out[key], node) if key in out else node
    return Node(out, above.origin)


def find(root: Node, keys: Sequence[str | int]) -> tuple[Node, int]:
    """The deepest node on the way along ``keys``, and how many keys lead to it."""
    node = root
    for depth, key in enumerate(keys):
        inside = node.value
        if isinstance(inside, dict) and isinstance(key, str) and key in inside:
            node = inside[key]
            continue
        if not (isinstance(inside, list) and isinstance(key, int) and key < len(inside)):
            return node, depth
        node = inside[key]
    return node, len(keys)


def _load(path: Path, chain: tuple[Path, ...]) -> Node:
    own = read_file(path)  # first, since it says what is wrong with a name that leads nowhere
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
        raise UserError(f"{path}: extends itself: {names}; break the circle")
    assert isinstance(own.value, dict)
    above = Node({key: node for key, node in own.value.items() if key != "extends"}, own.origin)
    out: Node | None = None
    for base, origin in _bases(own.value.get("extends"), path):
        try:
            base.stat()
        except (OSError, ValueError):
            raise UserError(
                f"{origin}: extends: {base} does not exist; paths are relative to the file that names them"
            ) from None
        if base.is_dir():
            raise UserError(f"{origin}: extends: {base} is a folder; name a YAML file in it")
        below = _load(base, (*chain, resolved))
        out = below if out is None else merge(out, below)
    return above if out is None else merge(out, above)


def _bases(node: Node | None, path: Path) -> list[tuple[Path, str]]:
    if node is None:
        return []
    items = node.value if isinstance(node.value, list) else [node]
    bases = []
    for item in items:
        if not isinstance(item.value, str):
            raise UserError(f"{item.origin}: extends: takes a file name or a list of them")
        bases.append((Path(os.path.normpath(path.parent / item.value)), item.origin))
    return bases


def _override(text: str, root: Node) -> Node:
    """A map holding just what ``key.path=value`` sets."""
    key, equals, value = text.partition("=")
    names = key.split(".")
    if not equals or not all(name and name.strip() == name for name in names):
        raise UserError(f"override {text!r}: write section.key=value, as in optim.muon.lr=0.02", ExitCode.USAGE)
    if names == ["extends"]:
        raise UserError("override 'extends': only a file can extend another", ExitCode.USAGE)
    at, depth = find(root, names)
    if isinstance(at.value, list) and depth < len(names):
        raise UserError(
            f"override {text!r}: {'.'.join(names[:depth])} is a list; give the whole list: "
            f"{'.'.join(names[:depth])}=[...]",
            ExitCode.USAGE,
        )
    node = _relabel(read_text(value, f"override {text!r}", lines=False))
    for name in reversed(names):
        node = Node({name: node}, COMMAND_LINE)
    return node


def _relabel(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _relabel(item) for key, item in node.value.items()}, COMMAND_LINE)
    if isinstance(node.value, list):
        return Node([_relabel(item) for item in node.value], COMMAND_LINE)
    return Node(node.value, COMMAND_LINE)
