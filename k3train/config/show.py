"""The resolved experiment as YAML, each value followed by where it came from. Imports no JAX."""

import json
from typing import Any

from k3train.config.yaml_reader import scalar


def lines(values: dict[str, Any], provenance: dict[str, str]) -> list[tuple[str, str]]:
    """(YAML line, provenance) pairs; sections have an empty provenance. The YAML lines alone load again."""
    return list(_lines(values, provenance, ()))


def _lines(values: dict[str, Any], provenance: dict[str, str], path: tuple[str, ...]):
    for name, value in values.items():
        here = (*path, name)
        indent = "  " * len(path)
        if isinstance(value, dict) and value:
            yield f"{indent}{name}:", ""
            yield from _lines(value, provenance, here)
        else:
            yield f"{indent}{name}: {literal(value)}", provenance.get(".".join(here), "")


def literal(value: Any) -> str:
    """A value as flow YAML 1.2 that reads back as itself."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            return "[" + ", ".join(map(literal, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
        case str():
            return value if _plain(value) else json.dumps(value, ensure_ascii=False)
        case _:
            return repr(value)


def _plain(text: str) -> bool:
    """Whether ``text`` may stand unquoted and stays text."""
    safe = all(c.isalnum() or c in "_-./@*+ " for c in text) and text[:1].isalnum() | (text[:1] in "./_")
    return safe and text == text.strip() and scalar(text) == text


def aligned(rows: list[tuple[str, str]], limit: int = 60) -> list[tuple[str, str]]:
    """The same rows, YAML padded to one width (at most ``limit``) where a provenance follows."""
    width = min(limit, max((len(text) for text, origin in rows if origin), default=0))
    return [(text.ljust(width) if origin else text, origin) for text, origin in rows]
