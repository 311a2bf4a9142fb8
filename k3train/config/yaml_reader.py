"""Strict YAML reader: YAML 1.2 core scalars, no duplicate keys, every value knows its file and line. Imports no JAX.

PyYAML scans and composes; what a plain scalar means is decided here, since PyYAML follows YAML 1.1
(where ``1e-4`` is text, ``010`` is eight, ``no`` is false and ``12:30`` is 750).
"""

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from k3train.config.errors import UserError

Scalar = str | int | float | bool | None

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
_MOST = 100_000  # values of one file, aliases written out
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "map", "seq")} | {"!"}


@dataclass(frozen=True)
class Node:
    """A value of the file.

    Attributes:
      value: a scalar, a dict of nodes by key, or a list of nodes.
      origin: where it was written, ``file:line`` (of its key, where it has one) or ``command line``.
    """

    value: "Scalar | dict[str, Node] | list[Node]"
    origin: str

    def plain(self) -> object:
        """The value with every nested node unwrapped."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


def scalar(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar by the YAML 1.2 core schema."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INFINITE.fullmatch(text) or text in _NAN:
        return float(text.replace(".", "", 1))
    return text


def read_file(path: Path) -> Node:
    """The file's top-level map.

    Raises:
      UserError: where the file is missing, a folder, unreadable, not UTF-8, empty, not YAML, or no map.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; name a YAML file in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
    except ValueError:
        raise UserError(f"{str(path)!r} is no file name") from None
    root = read_text(text, str(path))
    if root.value is None:
        raise UserError(f"{path}: the file is empty; it must hold a map of sections (run:, model:, ...)")
    if not isinstance(root.value, dict):
        raise UserError(f"{root.origin}: the file must hold a map of sections (run:, model:, ...)")
    return root


def read_text(text: str, name: str, lines: bool = True) -> Node:
    """The single YAML document in ``text``; ``name`` stands in origins and messages, with the line where ``lines``.

    Raises:
      UserError: where the text is not one well-formed document.
    """
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
        if root is None:
            return Node(None, f"{name}:1" if lines else name)
        return _Converter(name, lines).convert(root, None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}" if lines and mark else name
        raise UserError(f"{place}: not valid YAML: {_problem(error, text)}") from None
    except yaml.reader.ReaderError as error:
        place = f"{name}:{text.count(chr(10), 0, error.position) + 1}" if lines else name
        raise UserError(
            f"{place}: a control character (code {ord(text[error.position])}) is not allowed in YAML"
        ) from None
    except RecursionError:
        raise UserError(f"{name}: maps or lists are nested hundreds deep; an experiment needs a handful") from None


def _problem(error: yaml.MarkedYAMLError, text: str) -> str:
    mark = error.problem_mark
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in line[: len(line) - len(line.lstrip())] or (mark and line[mark.column : mark.column + 1] == "\t"):
        return "a tab; indent with spaces"
    if error.problem and "but found another document" in error.problem:
        return "the file holds several documents (---); keep one"
    return ", ".join(part for part in (error.context, error.problem) if part)


class _Converter:
    """Turns PyYAML's nodes into ours, refusing what the house does not read."""

    def __init__(self, name: str, lines: bool):
        self.name, self.lines = name, lines
        self.open: list[yaml.Node] = []
        self.values = 0

    def place(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def convert(self, node: yaml.Node, origin: str | None) -> Node:
        origin = origin or self.place(node)
        self.values += 1
        if self.values > _MOST:
            raise UserError(f"{self.name}: more than {_MOST:,} values once its aliases (*name) are written out")
        if node.tag not in _TAGS:
            raise UserError(f"{self.place(node)}: tags ({node.tag}) are not read; write the plain value")
        if isinstance(node, yaml.ScalarNode):
            return Node(self.scalar(node), origin)
        if any(node is other for other in self.open):
            raise UserError(f"{self.place(node)}: an alias (*name) inside its own anchor has no end")
        self.open.append(node)
        if isinstance(node, yaml.SequenceNode):
            out = Node([self.convert(item, None) for item in node.value], origin)
        else:
            assert isinstance(node, yaml.MappingNode)
            out = Node(self.entries(node), origin)
        self.open.pop()
        return out

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        if node.style is not None:
            return node.value
        try:
            return scalar(node.value)
        except ValueError:  # Python refuses integers beyond some thousands of digits.
            raise UserError(f"{self.place(node)}: a number of {len(node.value)} digits is too long") from None

    def entries(self, node: yaml.MappingNode) -> dict[str, Node]:
        out: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise UserError(f"{place}: a key must be a name, not a list or map")
            key = key_node.value
            if key == "<<" and key_node.style is None:
                raise UserError(f"{place}: merge keys (<<) are not read; use extends:")
            if key in out:
                raise UserError(f"{place}: duplicate key {key!r}, first given at {out[key].origin}; remove one")
            out[key] = self.convert(value_node, place)
        return out
