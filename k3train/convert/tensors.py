"""Published tensors to our trees and back, by the parts' own name tables. Arrays are NumPy; imports no JAX."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from k3train.config.errors import UserError
from k3train.models.config import ModelConfig
from k3train.models.names import model_names


def import_tensors(
    cfg: ModelConfig, tensors: Mapping[str, np.ndarray], params: dict, buffers: dict, prefix: str
) -> tuple[dict, dict]:
    """Our parameters and buffers filled from published tensors, every array of the main model.

    Args:
      tensors: published name to array.
      params, buffers: trees whose leaves have our shapes (abstract or real); leaves without a published form stay.
      prefix: see :func:`k3train.models.names.model_names`.

    Raises:
      UserError: naming tensors that are missing, unknown, or of another shape.
    """
    used, missing = set(), []
    trees = {False: _copy(params), True: _copy(buffers)}
    filled: dict[tuple, np.ndarray] = {}
    for home, stored in model_names(cfg, prefix).items():
        shape = _at(trees[home.buffer], home.path).shape
        shape = shape if home.repeat is None else shape[1:]
        names = [stored.name]
        if "{expert}" in stored.name:
            names = [stored.name.format(expert=e) for e in range(shape[0])]
            shape = shape[1:]
        used.update(names)
        absent = [name for name in names if name not in tensors]
        if absent:
            missing += absent
            continue
        try:
            arrays = [stored.to_ours(tensors[name], shape) for name in names]
        except ValueError as error:
            raise UserError(f"published tensor {error}") from None
        array = np.stack(arrays) if "{expert}" in stored.name else arrays[0]
        if home.repeat is None:
            _put(trees[home.buffer], home.path, array)
        else:
            whole = filled.setdefault(
                (home.buffer, home.path), np.empty(_at(trees[home.buffer], home.path).shape, array.dtype)
            )
            whole[home.repeat] = array
    unknown = sorted(set(tensors) - used)
    if missing or unknown:
        raise UserError(
            "; ".join(
                f"{len(names)} {what} tensors, first {names[0]}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
    for (buffer, path), array in filled.items():
        _put(trees[buffer], path, array)
    return trees[False], trees[True]


def export_tensors(cfg: ModelConfig, params: dict, buffers: dict, prefix: str) -> dict[str, np.ndarray]:
    """Published tensors of our arrays; also maps gradients (trees of the parameters' form) to published names."""
    trees, out = {False: params, True: buffers}, {}
    for home, stored in model_names(cfg, prefix).items():
        array = np.asarray(_at(trees[home.buffer], home.path))
        array = array if home.repeat is None else array[home.repeat]
        if "{expert}" in stored.name:
            out |= {stored.name.format(expert=e): stored.to_stored(one) for e, one in enumerate(array)}
        else:
            out[stored.name] = stored.to_stored(array)
    return out


def _copy(tree: dict) -> dict:
    return {k: _copy(v) if isinstance(v, dict) else v for k, v in tree.items()}


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict, path: tuple[str, ...], value) -> None:
    _at(tree, path[:-1])[path[-1]] = value
