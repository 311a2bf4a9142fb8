"""A Flax module as pure functions: its arrays in plain nested dicts, its structure kept aside."""

from collections.abc import Callable

import jax
from flax import nnx

from k3train.models.param import Buffer


class ModuleDef:
    """Structure of a module built by ``make(rngs)``.

    Attributes:
      module: the module with shapes in place of arrays.
      specs: nested dict of every parameter's :class:`k3train.models.param.ParamSpec`.
    """

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]):
        self._make = make
        self.module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        self._graph, params, self._buffers = nnx.split(self.module, nnx.Param, Buffer)
        self._params = params
        self.specs = jax.tree.map(
            lambda v: v.get_metadata()["spec"], _pure_variables(params), is_leaf=lambda v: isinstance(v, nnx.Variable)
        )

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """Fresh parameters and buffers, as nested dicts of arrays."""
        _, params, buffers = nnx.split(self._make(nnx.Rngs(params=key)), nnx.Param, Buffer)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(buffers)

    def bind(self, params: dict, buffers: dict) -> nnx.Module:
        """The module with these arrays in it."""
        return nnx.merge(self._graph, _with(self._params, params), _with(self._buffers, buffers))


def _pure_variables(state: nnx.State) -> dict:
    """Nested dict of the state's variables."""
    return {k: _pure_variables(v) if isinstance(v, nnx.State) else v for k, v in state.items()}


def _with(state: nnx.State, arrays: dict) -> nnx.State:
    """A state of the same variables holding ``arrays``."""
    return nnx.State(
        {k: _with(v, arrays[k]) if isinstance(v, nnx.State) else v.replace(arrays[k]) for k, v in state.items()}
    )
