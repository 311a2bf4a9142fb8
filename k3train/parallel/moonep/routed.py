"""Routed experts over a mesh axis, perfectly balanced: MoonEP (k3-facts 6). The entry is :func:`routed`.

One hand-written gradient spans everything from dispatch to combine. It keeps the tokens, the matrices and the plan;
the backward pass sends the tokens and the redundant experts' matrices again.

Letters: R ranks, E experts, G = E / R own experts, S tokens a rank, k assignments a token, L token width, M expert
width.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from k3train.parallel.moonep import prefetch, travel
from k3train.parallel.moonep.compute import Experts, Matrices
from k3train.parallel.moonep.config import Options, Transport, resolve
from k3train.parallel.moonep.layout import Layout, Sizes, lay, most_redundant, rounds, sizes_of
from k3train.parallel.moonep.plan import Plan, name, plan, rank_loads
from k3train.parallel.moonep.transports import Count, copies_sent, wire


class Routed(NamedTuple):
    """One layer's static choices; its methods concern one round, 0 or 1, each."""

    sizes: Sizes
    experts: Experts
    transport: Transport
    capacity: int | None

    @property
    def exact(self) -> bool:
        """Whether matrices travel by ``ragged_all_to_all`` too."""
        return self.transport == "ragged"

    def _turns(self, plan: Plan) -> jax.Array:
        """How often ``slots`` matrices travel in the second round."""
        slots = self.sizes.slots
        return -(-(most_redundant(plan, self.sizes) - slots) // slots)

    def held(self, matrices: Matrices, plan: Plan, layout: Layout, turn: int, dtype: jnp.dtype) -> Matrices:
        """The matrices of a round, [X, ...] in ``dtype``: own and first redundant ones, or the other redundant ones."""
        (axis, slots), out = (self.sizes.axis, self.sizes.slots), []
        for own in (w.astype(dtype) for w in matrices):
            if turn:
                held = prefetch.fetch_all(own, layout.experts, slots, self._turns(plan), axis, exact=self.exact)
            elif slots:
                held = jnp.concatenate([own, prefetch.fetch(own, layout.experts, axis, exact=self.exact)])
            else:
                held = own
            out.append(held)
        return out[0], out[1], out[2]

    def homed(self, gradient: jax.Array, plan: Plan, layout: Layout, turn: int) -> jax.Array:
        """Gradients of held matrices [X, ...], the foreign ones brought home and added: [G, ...], wide."""
        own, axis, slots = self.sizes.own, self.sizes.axis, self.sizes.slots
        if turn:
            turns = self._turns(plan)
            return prefetch.give_back_all(gradient, layout.experts, slots, turns, own, axis, exact=self.exact)
        if not slots:
            return gradient
        returned = prefetch.give_back(gradient[own:], layout.experts, own, axis, exact=self.exact)
        return prefetch.add_returned(gradient[:own], returned, layout.experts, axis)

    def forward(self, z: jax.Array, weights: jax.Array, matrices: Matrices, plan: Plan, turn: int) -> jax.Array:
        """Round ``turn``: its part of y, [S, L] wide."""
        layout = lay(plan, self.sizes, turn)
        with jax.named_scope("moonep_prefetch"):
            held = self.held(matrices, plan, layout, turn, z.dtype)
        with jax.named_scope("moonep_dispatch"):
            way = wire(self.transport, layout, self.sizes, self.capacity)
            (rows,), weight, first = travel.deliver(way, layout, self.sizes, (z,), weights)
        with jax.named_scope("moonep_experts"):
            out = self.experts.forward(rows, held, layout)
        with jax.named_scope("moonep_combine"):
            return travel.collect(way, layout, self.sizes, first, out, scale=weight)[0]

    def backward(
        self, z: jax.Array, dy: jax.Array, weights: jax.Array, matrices: Matrices, plan: Plan, turn: int
    ) -> tuple[jax.Array, jax.Array, Matrices]:
        """Round ``turn``: its part of the gradients of z, weights and matrices, all wide."""
        layout = lay(plan, self.sizes, turn)
        with jax.named_scope("moonep_prefetch"):
            held = self.held(matrices, plan, layout, turn, z.dtype)
        with jax.named_scope("moonep_dispatch"):
            way = wire(self.transport, layout, self.sizes, self.capacity)
            tokens = z, dy.astype(z.dtype)
            (rows, d_out), weight, first = travel.deliver(way, layout, self.sizes, tokens, weights)
        with jax.named_scope("moonep_experts"):
            d_rows, d_weight, d_matrices = self.experts.backward(rows, d_out, weight, held, layout)
        with jax.named_scope("moonep_combine"):
            dz, d_weights = travel.collect(way, layout, self.sizes, first, d_rows, each=d_weight)
        assert d_weights is not None
        with jax.named_scope("moonep_return"):
            w1, w3, w2 = (self.homed(d, plan, layout, turn) for d in d_matrices)
        return dz, d_weights, (w1, w3, w2)


def _differentiable(layer: Routed) -> Callable[[jax.Array, jax.Array, Matrices, Plan], jax.Array]:
    """(z, weights, matrices, plan) -> y, all rounds, with its gradient."""

    def count(plan: Plan) -> Count:
        return rounds(plan, layer.sizes) if layer.sizes.late else 1

    def compute(z, weights, matrices, plan):
        first = layer.forward(z, weights, matrices, plan, 0)
        return travel.repeat(first, lambda _, y: y + layer.forward(z, weights, matrices, plan, 1), count(plan))

    def forward(z, weights, matrices, plan):
        return compute(z, weights, matrices, plan), (z, weights, matrices, plan)

    def backward(saved, dy):
        z, weights, matrices, plan = saved

        def turn(number: int):
            return layer.backward(z, dy, weights, matrices, plan, number)

        def more(_, so_far):
            return jax.tree.map(jnp.add, so_far, turn(1))

        dz, d_weights, d_matrices = travel.repeat(turn(0), more, count(plan))
        d_matrices = tuple(d.astype(w.dtype) for d, w in zip(d_matrices, matrices, strict=True))
        return dz.astype(z.dtype), d_weights.astype(weights.dtype), d_matrices, None

    run = jax.custom_vjp(compute)
    run.defvjp(forward, backward)
    return run


def routed(
    z: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    matrices: Matrices,
    *,
    axis: str,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    options: Options = Options(),
    implementation: Literal["auto", "blocked", "reference"] = "auto",
    block: int = 128,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """``y_n = sum_j weights_nj w2_e(activation(w1_e z_n, w3_e z_n))``, e = ids_nj, the experts spread over ``axis``.

    Called inside a fully manual ``jax.shard_map(..., check_vma=False)``. No token is dropped, whatever the routing.

    Args:
      z: [S, L] this rank's tokens, in the dtype in which they travel and are multiplied.
      ids: [S, k] int32 chosen experts, in [0, E).
      weights: [S, k] wide.
      matrices: this rank's experts, those from rank * G on: w1 [G, L, M], w3 [G, L, M], w2 [G, M, L].
      axis: the mesh axis of R ranks that share the experts.
      activation: gated activation (gate, up) -> inner; differentiated by ``jax.vjp``, closes over no arrays.
      options: transport, slots for redundant experts, capacity of ``padded``.
      implementation: of the grouped matmul.
      block: its greatest block, in rows.

    Returns:
      (y [S, L] wide, statistics without gradient): ``load_before`` and ``load_after`` [R] int32 assignments a rank,
      at home and as planned; ``redundant_experts`` [R] int32; ``rounds`` int32; all alike on all ranks; and
      ``rows_sent`` int32, copies of this rank's tokens that other ranks need.

    Raises:
      ValueError: several ranks and ``redundant_slots`` below 1.
    """
    ids, weights = name(ids), name(weights)
    sizes = sizes_of(axis, ids, matrices[0].shape[0], options.redundant_slots, block)
    transport = resolve(options, sizes.ranks, sizes.top_k, sizes.tokens, z.shape[1], z.dtype.itemsize)
    layer = Routed(sizes, Experts(activation, implementation), transport, options.capacity)
    with jax.named_scope("moonep_plan"):
        where = plan(ids, sizes.experts, axis)
    y = _differentiable(layer)(z, weights, matrices, where)
    before, after, redundant = rank_loads(where.alloc)
    stats = {
        "load_before": before,
        "load_after": after,
        "redundant_experts": redundant,
        "rounds": rounds(where, sizes),
        "rows_sent": copies_sent(where.rank, axis),
    }
    return y, stats
