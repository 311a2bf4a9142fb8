"""From files and overrides to a checked experiment; faults are listed with file, line, key and cure. Imports no JAX."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from k3train.config.compose import compose, find
from k3train.config.errors import UserError
from k3train.config.rules import RuleError
from k3train.config.schema import keys, section_at
from k3train.config.section import Section
from k3train.config.yaml_reader import Node

DEFAULT = "default"

_RENAMED = {"mesh.data": "mesh.replica"}

# Pydantic's type of fault -> what was expected, for those whose own message speaks of Python.
_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a section (a map of keys)",
    "model_attributes_type": "a section (a map of keys)",
}


class Loaded[S: Section](NamedTuple):
    """A checked experiment, and where each of its values was written (``file:line``, command line, default)."""

    experiment: S
    provenance: dict[str, str]


def load[S: Section](path: str | Path, overrides: Sequence[str], schema: type[S]) -> Loaded[S]:
    """Reads, composes and checks an experiment.

    Args:
      path: the experiment file.
      overrides: ``dotted.key=value`` texts.
      schema: the class of the whole (``k3train.experiment.Experiment``).

    Raises:
      UserError: every fault that was found, one paragraph each.
    """
    root = compose(path, overrides)
    try:
        experiment = schema.model_validate(root.plain())
    except ValidationError as error:
        raise UserError(_report(Path(path), error, root, schema)) from None
    return Loaded(experiment, provenance(experiment.model_dump(), root))


def provenance(values: dict[str, Any], root: Node, prefix: tuple[str, ...] = ()) -> dict[str, str]:
    """Where each leaf of ``values`` (nested maps; lists are leaves) was written, by dotted name."""
    out: dict[str, str] = {}
    for name, value in values.items():
        path = (*prefix, name)
        if isinstance(value, dict):
            out |= provenance(value, root, path)
        else:
            node, depth = find(root, path)
            out[".".join(path)] = node.origin if depth == len(path) else DEFAULT
    return out


def _report(path: Path, error: ValidationError, root: Node, schema: type[Section]) -> str:
    faults: list[str] = []
    for item in error.errors(include_url=False):
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, RuleError):
            faults += [_rule(fault, root) for fault in cause.faults]
        else:
            faults.append(_describe(dict(item), root, schema))
    many = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
    return f"{path}: {many} in the experiment\n" + "\n".join(f"  {fault}" for fault in faults)


def _rule(fault, root: Node) -> str:
    keys_and_places = ", ".join(f"{key} ({_origin(root, key.split('.'))})" for key in fault.keys)
    return f"{keys_and_places}: {fault.problem}\n    fix: {fault.fix}"


def _origin(root: Node, path: Sequence[str | int]) -> str:
    node, depth = find(root, path)
    return node.origin if depth == len(path) else DEFAULT


def _describe(item: dict[str, Any], root: Node, schema: type[Section]) -> str:
    """One fault of one value as ``origin: dotted.key: what is wrong``."""
    path, kind, ctx = item["loc"], item["type"], item.get("ctx", {})
    node, depth = find(root, path)
    key = ".".join(map(str, path)) or "the experiment"
    if kind == "missing":
        where = "the file" if depth == 0 else f"section {'.'.join(map(str, path[:depth]))}"
        return f"{node.origin}: {key}: required, but {where} does not give it"
    if kind == "extra_forbidden":
        return f"{node.origin}: {key}: unknown key; {_nearest(path, schema)}"
    if kind == "literal_error":
        problem = f"expected {ctx['expected']}, got {_shown(node)}"
    elif kind in _EXPECTED:
        problem = f"expected {_EXPECTED[kind]}, got {_shown(node)}{_hint(kind, node.value)}"
    elif kind == "value_error":
        return f"{node.origin}: {key}: {ctx['error']}"
    else:
        problem = f"{item['msg'][0].lower()}{item['msg'][1:]}, got {_shown(node)}"
    return f"{node.origin}: {key}: {problem}"


def _shown(node: Node) -> str:
    match node.value:
        case None:
            return "nothing (null)"
        case bool():
            return str(node.value).lower()
        case str():
            return f"the text {node.value!r}"
        case dict():
            return "a map"
        case list():
            return "a list"
        case _:
            return str(node.value)


def _hint(kind: str, value: object) -> str:
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"; write {int(value)}"
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return f"; write {'true' if value.lower() in ('yes', 'on') else 'false'} (YAML 1.2 reads {value} as text)"
    if value is None and kind.startswith("model"):
        return "; leave the key out to keep the defaults"
    return ""


def _nearest(path: tuple[str | int, ...], schema: type[Section]) -> str:
    """Valid names like the last of ``path``: the same name in another section first, then what looks like it here."""
    *parents, name = path
    section = section_at(schema, parents)
    prefix = "".join(f"{p}." for p in parents)
    valid = list(section.model_fields) if section else []
    if now := _RENAMED.get(f"{prefix}{name}"):
        return f"it is called {now} now"
    close = [prefix + match for match in difflib.get_close_matches(str(name), valid, n=3, cutoff=0.6)]
    elsewhere = [key for key in keys(schema) if key.split(".")[-1] == name][:3]
    if close or elsewhere:
        return "did you mean " + " or ".join(dict.fromkeys(elsewhere + close)) + "?"
    return f"{prefix[:-1] or 'an experiment'} takes {', '.join(valid)}"
