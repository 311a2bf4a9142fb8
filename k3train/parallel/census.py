"""What a compiled program moves and multiplies: collectives by mesh axis with bytes, and FLOPs of its dots.

XLA's own cost analysis counts a loop's body once, and on GPU says nothing. Here the optimised program's text is read:
loops count as often as they run (``known_trip_count``), fusions and calls are followed, of a condition all branches.
Loops that run as often as the data asks, perhaps never, are kept apart, with one turn. Imports no JAX.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4,
    "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0,
}  # fmt: skip
COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
)  # fmt: skip


class Op(NamedTuple):
    """One instruction."""

    name: str
    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """(dtype, sizes) of the result, of each part of a tuple."""
    text: str
    """Operands and attributes."""


class Moved(NamedTuple):
    """Equal collectives of one program."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes along which devices exchange."""
    times: int
    """How often a step does it, loops included."""
    bytes: float
    """That leave a device, all times together: (g - 1) / g of what is gathered, scattered or exchanged among g devices,
    twice that for an all-reduce."""


class Run(NamedTuple):
    """How an instruction runs."""

    times: int
    asked: bool
    """Whether it lies in a loop that runs as often as the data asks; times are then those of one turn."""


class Census(NamedTuple):
    """A program's account."""

    moved: list[Moved]
    """Most bytes first."""
    flops: float
    """Of one device's dots, two a multiplication and addition."""
    asked_moved: list[Moved]
    """One turn of each loop that runs as often as the data asks."""
    asked_flops: float
    """Of the dots there."""


_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def census(text: str, mesh: Mapping[str, int]) -> Census:
    """Reads a program.

    Args:
      text: ``compiled.as_text()``.
      mesh: size by axis, outermost first, as the devices of the program are numbered.

    Raises:
      ValueError: the text has no entry computation.
    """
    computations, entry = _computations(text)
    moved: dict[bool, dict[tuple[str, tuple[str, ...]], list[float]]] = {False: {}, True: {}}
    flops = {False: 0.0, True: 0.0}
    for op, run, scope in _walk(computations, entry, Run(1, asked=False)):
        kind = op.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            groups = _groups(op.text)
            size = len(groups[0]) if groups else math.prod(mesh.values())
            total = moved[run.asked].setdefault((kind, _axes(groups, mesh)), [0, 0.0])
            total[0] += run.times
            total[1] += run.times * _leaving(kind, op, size)
        else:
            flops[run.asked] += run.times * _flops(op, scope)
    rows = {
        asked: sorted((Moved(*key, int(times), count) for key, (times, count) in found.items()), key=lambda r: -r.bytes)
        for asked, found in moved.items()
    }
    return Census(rows[False], flops[False], rows[True], flops[True])


def _computations(text: str) -> tuple[dict[str, list[Op]], str]:
    """Instructions by computation, and the entry's name."""
    found: dict[str, list[Op]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line.endswith("{") and "->" in line and not line.startswith(" "):
            words = line.split()
            name = (words[1] if words[0] == "ENTRY" else words[0]).lstrip("%").partition("(")[0]
            entry = name if words[0] == "ENTRY" else entry
            current = found.setdefault(name, [])
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _OP.match(line)):
            current.append(_op(*match.groups()))
    if not entry:
        raise ValueError("this is no program: it has no ENTRY computation")
    return found, entry


def _op(name: str, rest: str) -> Op:
    if rest.startswith("("):  # a tuple's type, up to its closing bracket
        depth = itertools.accumulate((c == "(") - (c == ")") for c in rest)
        end = next(i for i, open_ in enumerate(depth) if not open_) + 1
        result, rest = rest[:end], rest[end:]
    else:
        result, _, rest = rest.partition(" ")
    kind, _, text = rest.strip().partition("(")
    shapes = tuple((dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _SHAPE.findall(result))
    return Op(name, kind, shapes, text)


def _walk(computations: dict[str, list[Op]], name: str, run: Run) -> Iterator[tuple[Op, Run, dict[str, Op]]]:
    """Every instruction with how it runs, and its neighbours by name."""
    scope = {op.name: op for op in computations.get(name, ())}
    for op in scope.values():
        yield op, run, scope
        if op.kind in ("all-reduce", "all-reduce-start", "reduce-scatter", "reduce", "scatter", "sort", "map"):
            continue  # what they apply is a sum of two numbers
        inside = run
        if op.kind == "while":
            trips = _TRIPS.search(op.text)
            inside = Run(run.times * int(trips.group(1)), run.asked) if trips else Run(run.times, asked=True)
        called = _CALLED.findall(op.text)
        for names in _BRANCHES.findall(op.text):
            called += [branch.strip().lstrip("%") for branch in names.split(",")]
        for other in dict.fromkeys(called):
            yield from _walk(computations, other, inside)


def _groups(text: str) -> list[list[int]]:
    """Device numbers that exchange with each other; of a permutation, its pairs."""
    for pattern in (r"replica_groups=\{(\{[\d,{} ]*\})\}", r"source_target_pairs=\{(\{[\d,{} ]*\})\}"):
        if match := re.search(pattern, text):
            return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d, ]+)\}", match.group(1))]
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        return _named_groups(*match.groups())
    match = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        return []
    shape, dims = ([int(n) for n in match.group(i).split(",")] for i in (1, 2))
    order = [int(n) for n in match.group(3).split(",")] if match.group(3) else list(range(len(dims)))
    ids = _transposed(dims, order)
    return [ids[i * shape[-1] : (i + 1) * shape[-1]] for i in range(len(ids) // shape[-1])]


def _named_groups(mesh: str, axes: str) -> list[list[int]]:
    """Groups of a mesh written out as ``'a'=2,'b'=4``, along the axes ``'b'``."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    along = re.findall(r"'([^']*)'", axes)
    order = [i for i, name in enumerate(sizes) if name not in along] + [list(sizes).index(name) for name in along]
    ids, size = _transposed(list(sizes.values()), order), math.prod(sizes[name] for name in along)
    return [ids[i * size : (i + 1) * size] for i in range(len(ids) // size)]


def _transposed(dims: list[int], order: list[int]) -> list[int]:
    """0, 1, 2, ... in the shape ``dims``, transposed, flat."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    out = [0]
    for axis in order:
        out = [base + i * strides[axis] for base in out for i in range(dims[axis])]
    return out


def _axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes whose coordinate differs within a group."""
    if not groups:
        return tuple(axis for axis, size in mesh.items() if size > 1)
    names, sizes = list(mesh), list(mesh.values())
    differ: set[str] = set()
    for group in groups:
        for axis, size in enumerate(sizes):
            stride = math.prod(sizes[axis + 1 :])
            if len({device // stride % size for device in group}) > 1:
                differ.add(names[axis])
    return tuple(name for name in names if name in differ)


def _size(shape: tuple[str, tuple[int, ...]]) -> float:
    return BYTES.get(shape[0], 4) * math.prod(shape[1])


def _leaving(kind: str, op: Op, group: int) -> float:
    """Bytes that leave a device in one run of a collective."""
    sizes = [_size(shape) for shape in op.shapes if shape[0] in BYTES]
    if op.kind.endswith("-start"):  # (operands, results, ...): the results are as many as the operands
        sizes = sizes[len(sizes) // 2 :] if kind != "all-reduce" else sizes
    total, part = sum(sizes), (group - 1) / group
    match kind:
        case "all-reduce":
            return 2 * total * part
        case "reduce-scatter":
            return total * (group - 1)
        case "collective-permute":
            return total
        case _:
            return total * part


def _flops(op: Op, scope: Mapping[str, Op]) -> float:
    """Of a dot, or of a library call that stands for one."""
    if op.kind == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.text)
    elif op.kind == "custom-call" and "dot_dimension_numbers" in op.text:
        match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', op.text)
    else:
        return 0.0
    typed = _SHAPE.match(op.text.strip())
    first = re.match(r"\s*(?:\w+\[[\d,]*\](?:\{[^}]*\})? )?%?([\w.\-]+)", op.text)
    if typed:
        left = tuple(int(n) for n in typed.group(2).split(",") if n)
    elif first and first.group(1) in scope:
        left = scope[first.group(1)].shapes[0][1]
    else:
        return 0.0
    contracted = [int(n) for n in re.findall(r"\d+", match.group(1))] if match else []
    return 2.0 * math.prod(op.shapes[0][1]) * math.prod(left[i] for i in contracted)
