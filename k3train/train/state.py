"""The training state: one nested dict of arrays, made where it will live."""

from collections.abc import Callable
from functools import cached_property

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.models.decoder import Decoder
from k3train.optim.ema import init_ema
from k3train.optim.guard import init_guard
from k3train.optim.optimizer import Optimizer
from k3train.parallel.axes import param_shardings

State = dict
"""``step`` int32; ``params``, ``buffers``, ``opt``, ``guard`` nested dicts; ``ema`` like params where weights are
averaged."""


class StateFactory:
    """Builds states of one run: abstract, sharded, fresh."""

    def __init__(self, decoder: Decoder, optimizer: Optimizer, mesh: Mesh, *, ema: bool):
        self._decoder, self._optimizer, self._ema = decoder, optimizer, ema
        self.mesh = mesh
        shapes = jax.eval_shape(self._make, jax.random.key(0))
        self.shardings = self._shardings(shapes)
        self.abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.shardings
        )

    def _make(self, key: jax.Array) -> State:
        params, buffers = self._decoder.init(key)
        state = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "buffers": buffers,
            "opt": self._optimizer.init(params),
            "guard": init_guard(self._optimizer.groups),
        }
        return state | ({"ema": init_ema(params)} if self._ema else {})

    def _shardings(self, shapes: State) -> State:
        """Parameters by their logical axes; an optimizer array like the parameter of its shape; the rest whole."""
        params = param_shardings(self.mesh, shapes["params"], self._decoder.specs())
        whole = NamedSharding(self.mesh, PartitionSpec())
        by_path = {
            jax.tree_util.keystr(path): (leaf.shape, sharding)
            for (path, leaf), sharding in zip(
                jax.tree.leaves_with_path(shapes["params"]), jax.tree.leaves(params), strict=True
            )
        }

        def like_params(path, leaf):
            for start in range(len(path)):
                shape, sharding = by_path.get(jax.tree_util.keystr(path[start:]), (None, whole))
                if shape == leaf.shape:
                    return sharding
            return whole

        return jax.tree_util.tree_map_with_path(like_params, shapes)

    @cached_property
    def _compiled(self) -> Callable[[jax.Array], State]:
        return jax.jit(self._make, out_shardings=self.shardings)

    def fresh(self, seed: int) -> State:
        """A new state; each device computes only its own shards."""
        with jax.set_mesh(self.mesh):
            return self._compiled(jax.random.key(seed))
