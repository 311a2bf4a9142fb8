"""The page of every config key, made from the sections themselves. Imports no JAX."""

import types
import typing
from collections.abc import Iterator
from typing import Any

from k3train.config.drift import classes
from k3train.config.schema import element_of, section_of
from k3train.config.section import Drift, Section
from k3train.config.show import literal

# Bounds from here up are those of 64-bit arrays, which every whole number has.
_OF_ARRAYS = 2**62

INTRODUCTION = """\
# Every config key

This page is made from the sections' own classes by `k3train config schema --markdown`; a test keeps the two equal.
How files are read, merged and overridden stands in [concepts.md](concepts.md).

A key is written nested in YAML, or dotted on the command line (`optim.muon.lr=0.01`). A section that says nothing
else has all its defaults when it is left out.

The last column says what may become of a key when a run goes on: a *frozen* one never changes within a run, a *branch*
one only in a run folder of its own, a *free* one at any time ([concepts.md](concepts.md#the-run-folder))."""


def markdown(schema: type[Section]) -> str:
    """A Markdown page of ``schema`` (``k3train.experiment.Experiment``).

    One heading a section, one table row a key with type, default, meaning and drift class.
    """
    parts, known = [INTRODUCTION], classes(schema)
    for name, section, optional in _sections(schema):
        about = _tidy(section.__doc__ or "") + (" The section may be `null`, its default." if optional else "")
        parts.append(f"## {name}\n\n{about}")
        rows = _rows(section, name, known)
        if rows:
            head = ["| key | type | default | meaning | on resume |", "|---|---|---|---|---|"]
            parts.append("\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)]))
    return "\n\n".join(parts)


def _sections(schema: type[Section], prefix: str = "", optional: bool = False) -> Iterator[tuple]:
    """(dotted name, class, whether null may stand there) of every section beneath ``schema``, parents first."""
    if prefix:
        yield prefix, schema, optional
    for name, field in schema.model_fields.items():
        inner = section_of(field.annotation)
        key = f"{prefix}.{name}" if prefix else name
        if inner is not None:
            nullable = types.NoneType in typing.get_args(field.annotation)
            yield from _sections(inner, key, nullable)
        elif element := element_of(field.annotation):
            yield f"{key}.{element[1]}", element[0], False


def _rows(section: type[Section], prefix: str, known: dict[str, Drift]) -> list[tuple[str, ...]]:
    properties = section.model_json_schema()["properties"]
    element = prefix not in known
    of_all = known[prefix.rpartition(".")[0]] if element else None  # the keys of an element change as the whole does
    rows = []
    for name, field in section.model_fields.items():
        if element or section_of(field.annotation) is None:
            default = "required" if field.is_required() else f"`{literal(field.default)}`"
            key, meaning = f"{prefix}.{name}", _tidy(field.description or "")
            rows.append((f"`{key}`", _type(properties[name]), default, meaning, of_all or known[key]))
    return rows


def _type(schema: dict[str, Any]) -> str:
    """A JSON Schema of one value in words."""
    match schema:
        case {"enum": values}:
            return " or ".join(f"`{value}`" for value in values)
        case {"anyOf": choices}:
            return " or ".join(dict.fromkeys(map(_type, choices)))
        case {"$ref": _}:
            return "section"
        case {"type": "object", "additionalProperties": values}:
            return f"map of names to a {_type(values)}"
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}s"
        case {"type": "string", "pattern": _}:
            return "text such as 2.0B"
        case {"type": "string"}:
            return "text"
        case {"type": "boolean"}:
            return "`true` or `false`"
        case {"type": "null"}:
            return "`null`"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("maximum", "<="))
        if key in schema and schema[key] < _OF_ARRAYS
    ]
    return " ".join([schema["type"], " and ".join(bounds)]).strip()


def _tidy(text: str) -> str:
    """A docstring on one line, as Markdown that a table cell can hold."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
