"""Nested dicts of arrays beside equal dicts of specs: flat views by path, and names collapsed over layers."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

Path = tuple[Any, ...]
Tree = Mapping[Any, Any]


class Spec(Protocol):
    """What the rooms below the model read of a ``ParamSpec`` (k3train/models/param.py)."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axes, the stack's axis left out."""
        ...

    @property
    def group(self) -> str:
        """``muon`` or ``adamw``."""
        ...

    @property
    def heads(self) -> int:
        """Blocks of the last axis under Per-Head Muon."""
        ...

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        ...


def flatten(tree: Tree) -> dict[Path, Any]:
    """Leaves by path, in sorted order of the keys' names; whatever is not a mapping is a leaf."""
    flat: dict[Path, Any] = {}
    for key in sorted(tree, key=str):
        value = tree[key]
        if isinstance(value, Mapping):
            flat.update({(key, *path): leaf for path, leaf in flatten(value).items()})
        else:
            flat[(key,)] = value
    return flat


def unflatten(flat: Mapping[Path, Any]) -> dict[Any, Any]:
    """The nested dict of the paths in ``flat``."""
    tree: dict[Any, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def rebuild(like: Tree, flat: Mapping[Path, Any], _above: Path = ()) -> dict[Any, Any]:
    """A dict of the form of ``like`` (empty branches included) with the leaves of ``flat``."""
    return {
        key: rebuild(value, flat, (*_above, key)) if isinstance(value, Mapping) else flat[(*_above, key)]
        for key, value in like.items()
    }


def paired(params: Tree, specs: Tree) -> dict[Path, tuple[Any, Spec]]:
    """(array, spec) by path.

    Raises:
      ValueError: an array without a spec, or a spec without an array.
    """
    arrays, declared = flatten(params), flatten(specs)
    if arrays.keys() != declared.keys():
        odd = sorted(name(path) for path in arrays.keys() ^ declared.keys())
        raise ValueError(f"arrays and specs do not pair: {', '.join(odd[:5])} ({len(odd)} in all)")
    return {path: (arrays[path], declared[path]) for path in arrays}


def name(path: Path) -> str:
    """Dotted name of a path."""
    return ".".join(str(key) for key in path)


def pattern(path: Path) -> str:
    """Dotted name with every number replaced by ``*``, so that equal arrays of many layers share it."""
    return ".".join("*" if str(key).isdigit() else str(key) for key in path)


def patterns(paths: Iterable[Path]) -> tuple[str, ...]:
    """The distinct patterns of ``paths``, in order of first sight."""
    return tuple(dict.fromkeys(pattern(path) for path in paths))
