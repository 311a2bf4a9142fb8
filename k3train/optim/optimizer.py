"""The optimizer of a run: clip, route every array to Muon or AdamW, report."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.kernels.numerics import wide
from k3train.optim.adamw import adamw
from k3train.optim.config import OptimConfig
from k3train.optim.groups import GROUPS, heads_of, split_groups, weight_decay_of
from k3train.optim.muon import muon
from k3train.optim.schedule import lr_factor
from k3train.parallel.axes import stored
from k3train.parallel.trees import Path, Tree, flatten, paired, rebuild, unflatten

Metrics = dict[str, jax.Array]


class Optimizer:
    """Updates a nested dict of float32 arrays; state is a plain nested dict of arrays.

    State: ``{"count": int32, "muon": {"momentum": tree}, "adamw": {"mu": tree, "nu": tree}}``, where each
    tree holds the group's own arrays under the same keys as the parameters.
    """

    def __init__(self, cfg: OptimConfig, specs: Tree):
        self.cfg = cfg
        self.specs = specs
        groups = split_groups(specs, cfg)
        self.paths = {group: tuple(groups[group]) for group in GROUPS}
        flat = flatten(specs)
        self.decay = {path: weight_decay_of(spec, cfg) for path, spec in flat.items()}
        self.groups = tuple(group for group in GROUPS if groups[group])
        """Groups that have arrays."""
        self.axes = {path: spec.axes for path, spec in flat.items()}
        self.heads = {path: heads_of(spec, cfg) for path, spec in flat.items()}

    def init(self, params: Tree) -> dict[str, Any]:
        """State before the first update: float32 zeros (sharded as ``jit``'s ``out_shardings`` say)."""
        paired(params, self.specs)
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), dict(params))
        state = self.arrange(shapes, jax.ShapeDtypeStruct((), jnp.int32))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state)

    def arrange(self, like_params: Tree, scalar: Any) -> dict[str, Any]:
        """A tree of the state's form from one of the parameters' form (shapes, shardings).

        Args:
          like_params: what each array's momentum or moment gets.
          scalar: what the counter gets.
        """
        flat = flatten(like_params)

        def of(group: str) -> dict[str, Any]:
            return unflatten({path: flat[path] for path in self.paths[group]})

        return {"count": scalar, "muon": {"momentum": of("muon")}, "adamw": {"mu": of("adamw"), "nu": of("adamw")}}

    def update(
        self,
        grads: Tree,
        opt_state: dict[str, Any],
        params: Tree,
        tokens_seen_after: float | jax.Array,
        total_tokens: float | jax.Array,
    ) -> tuple[dict[str, Any], dict[str, Any], Metrics]:
        """One update; pure, to be called under ``jit``.

        Args:
          grads: gradients, of the form of ``params``.
          opt_state: from :meth:`init` or the last update.
          params: float32 arrays.
          tokens_seen_after: tokens at the end of this step (float32 under ``jit``).
          total_tokens: tokens of the run.

        Returns:
          (params, opt_state, metrics). Nothing here looks whether they are finite (``optim/guard.py``). Metrics are
          float32 scalars: ``grad_norm``, ``grad_norm_clipped``, ``lr/<group>``, ``grad_norm/<group>`` (unclipped),
          ``update_norm/<group>``, ``update_rms/<group>``.
        """
        flat_params = flatten(params)
        flat_grads = {path: wide(g) for path, g in flatten(grads).items()}
        norm = optax.tree.norm(flat_grads)
        scale = self._clip_scale(norm)
        factor = jnp.float32(lr_factor(self.cfg.schedule, tokens_seen_after, total_tokens))
        rates = {group: getattr(self.cfg, group).lr * factor for group in GROUPS}

        clipped = {path: g * scale for path, g in flat_grads.items()}
        changes, new_state = self._changes(clipped, opt_state, flat_params, rates)
        new_params = {path: w + changes[path] for path, w in flat_params.items()}
        metrics = {"grad_norm": norm, "grad_norm_clipped": norm * scale}
        for group in self.groups:
            metrics[f"lr/{group}"] = rates[group]
            metrics[f"grad_norm/{group}"] = optax.tree.norm([flat_grads[p] for p in self.paths[group]])
            group_changes = [changes[p] for p in self.paths[group]]
            metrics[f"update_norm/{group}"] = optax.tree.norm(group_changes)
            metrics[f"update_rms/{group}"] = _rms(group_changes)
        return rebuild(params, new_params), new_state, metrics

    def _clip_scale(self, norm: jax.Array) -> jax.Array:
        if self.cfg.clip_norm is None:
            return jnp.ones_like(norm)
        return self.cfg.clip_norm / jnp.maximum(norm, self.cfg.clip_norm)

    def _changes(
        self,
        grads: dict[Path, jax.Array],
        state: dict[str, Any],
        params: dict[Path, jax.Array],
        rates: dict[str, jax.Array],
    ) -> tuple[dict[Path, jax.Array], dict[str, Any]]:
        """Change of every array and the state after it."""
        muon_grads = {path: grads[path] for path in self.paths["muon"]}
        adamw_grads = {path: grads[path] for path in self.paths["adamw"]}
        momentum = flatten(state["muon"]["momentum"])
        mu, nu = flatten(state["adamw"]["mu"]), flatten(state["adamw"]["nu"])
        lies = {path: stored(params[path].shape, self.axes[path]) for path in muon_grads}
        by_muon, momentum = muon(
            muon_grads, momentum, params, self.heads, self.decay, self.cfg.muon, rates["muon"], lies
        )
        by_adamw, mu, nu = adamw(
            adamw_grads, mu, nu, state["count"], params, self.decay, self.cfg.adamw, rates["adamw"]
        )
        new_state = {
            "count": state["count"] + 1,
            "muon": {"momentum": unflatten(momentum)},
            "adamw": {"mu": unflatten(mu), "nu": unflatten(nu)},
        }
        return by_muon | by_adamw, new_state


def _rms(arrays: list[jax.Array]) -> jax.Array:
    """Root mean square over all elements of ``arrays``."""
    return optax.tree.norm(arrays) / jnp.sqrt(jnp.float32(sum(x.size for x in arrays)))
