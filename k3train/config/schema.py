"""Questions about the section classes themselves: fields by dotted path, JSON Schema for editors. Imports no JAX."""

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from k3train.config.section import Section

_COLLECTIONS = (dict, list, tuple)


def section_of(annotation: Any) -> type[Section] | None:
    """The section class an annotation (optional or not) holds, if any."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Section) else None
    if typing.get_origin(annotation) in _COLLECTIONS:
        return None
    return next(filter(None, map(section_of, typing.get_args(annotation))), None)


def element_of(annotation: Any) -> tuple[type[Section], str] | None:
    """The section class that a map or list (optional or not) holds, and ``NAME`` or ``N`` for its keys; if any."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin not in _COLLECTIONS:
        return next(filter(None, map(element_of, arguments)), None)
    inner = next(filter(None, map(section_of, arguments)), None)
    return (inner, "NAME" if origin is dict else "N") if inner else None


def section_at(schema: type[Section], path: Sequence[str | int]) -> type[Section] | None:
    """The section class that the dotted ``path`` leads to; none where a value or nothing stands there."""
    steps = iter(path)
    for name in steps:
        field = schema.model_fields.get(str(name))
        inner = section_of(field.annotation) if field else None
        if field and inner is None and (element := element_of(field.annotation)) and next(steps, None) is not None:
            inner = element[0]
        if inner is None:
            return None
        schema = inner
    return schema


def keys(schema: type[Section], prefix: str = "") -> Iterator[str]:
    """Dotted names of every section and value beneath ``schema``."""
    for name, field in schema.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}.")


def json_schema(schema: type[Section]) -> dict[str, Any]:
    """JSON Schema of an experiment file, for editors.

    ``extends`` is added, and nothing is required: what a file leaves out, those it extends may give.
    """
    out = schema.model_json_schema()
    for part in (out, *out.get("$defs", {}).values()):
        part.pop("required", None)
    text = {"type": "string"}
    extends = {"anyOf": [text, {"type": "array", "items": text}], "description": "Files this one builds upon."}
    out["properties"] = {"extends": extends, **out["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **out}
