"""The layer stack: a prefix, a scanned period and a tail, differentiated by hand around the bank.

A layer's backward pass needs the bank of attention-residual rows as the layer saw it. As a plain scan carry the
bank would be saved once a repeat (23 times a gigabyte for K3 at 8K tokens). But rows are written once and read
only where filled, so the *final* bank serves every layer: the forward pass keeps each layer's own residuals and
leaves the bank out; the backward pass puts the final bank in its place, and sums its gradient in one wide buffer.

Shapes: R repeats, B batch, T tokens, D hidden, N rows of the bank, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from k3train.kernels.config import KernelsConfig
from k3train.kernels.numerics import wide
from k3train.models.block import DecoderLayer, Depth
from k3train.models.config import LayerKind, ModelConfig
from k3train.models.module import ModuleDef
from k3train.models.segments import Segment, segments
from k3train.parallel.moonep.config import Options
from k3train.parallel.weights import GATHERED, gather_weights

# What the backward pass must take from the forward one, never compute again: a recomputed choice of experts may differ.
SAVED_NAMES = ("routing",)


class Where(NamedTuple):
    """What a layer's place in the stack decides, as data: leading axis the repeats, then the position."""

    starts: Any  # NumPy or jax, bool [..., 2], whether (mixer, feed-forward) open a block
    filled: Any  # NumPy or jax, int32 [...], rows of the bank before the layer


def write_row(bank: jax.Array, at: jax.Array, row: jax.Array, starts: jax.Array) -> jax.Array:
    """The bank [N, B, T, D] with ``row`` [B, T, D] at index ``at`` where ``starts``, else unchanged."""
    at = jnp.minimum(at, bank.shape[0] - 1)
    old = lax.dynamic_index_in_dim(bank, at, keepdims=False)
    return lax.dynamic_update_index_in_dim(bank, jnp.where(starts, row, old), at, 0)


def take_row(bank: jax.Array, at: jax.Array, starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Transpose of :func:`write_row`: the row's gradient [B, T, D] (zero unless ``starts``), and the rest's."""
    at = jnp.minimum(at, bank.shape[0] - 1)
    row = lax.dynamic_index_in_dim(bank, at, keepdims=False)
    taken = jnp.where(starts, row, jnp.zeros_like(row))
    return taken, lax.dynamic_update_index_in_dim(bank, row - taken, at, 0)


class Stack:
    """Layers of one model as pure functions of nested dicts ``{segment: {position: arrays [R, ...]}}``."""

    def __init__(
        self,
        cfg: ModelConfig,
        kernels: KernelsConfig,
        kinds: Sequence[LayerKind],
        starts: Sequence[tuple[bool, bool]],
        *,
        remat: Literal["full", "none"],
        balance_bins: int,
        moonep: Options = Options(),
    ):
        self.segments = segments(kinds)
        self.banked = cfg.attn_residual.kind != "none"
        self.full = cfg.attn_residual.kind == "full"
        self.remat = remat
        self._starts = np.asarray(starts, bool).reshape(-1, 2)  # [L, 2]
        self._filled = (np.cumsum(self._starts.sum(1)) - self._starts.sum(1)).astype(np.int32)  # [L]
        self.rows = int(self._starts.sum())
        self._layers = {
            kind: ModuleDef(lambda rngs, kind=kind: DecoderLayer(cfg, kind, kernels, balance_bins, moonep, rngs=rngs))
            for kind in dict.fromkeys(kinds)
        }

    # -- parameters ---------------------------------------------------------------------------------------------

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """Parameters and buffers; a layer's draw depends on its number, not on how the stack is split."""
        params, buffers = {}, {}
        for seg in self.segments:
            for j, kind in enumerate(seg.kinds):
                numbers = jnp.asarray([seg.layer(r, j) for r in range(seg.repeats)])
                keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers)
                p, b = jax.vmap(self._layers[kind].init)(keys)
                params.setdefault(seg.name, {})[str(j)] = p
                if b:  # an empty dict would not survive a checkpoint
                    buffers.setdefault(seg.name, {})[str(j)] = b
        return params, buffers

    def specs(self) -> dict:
        """The :class:`ParamSpec` of every parameter, in the parameters' own nesting."""
        return {
            seg.name: {str(j): self._layers[kind].specs for j, kind in enumerate(seg.kinds)} for seg in self.segments
        }

    def layer(self, number: int, params: dict, buffers: dict) -> tuple[Any, Where]:
        """Layer ``number`` (from 0) as a module with its own arrays, and its place; to look at one layer alone."""
        for seg in self.segments:
            repeat, j = divmod(number - seg.first, len(seg.kinds))
            if 0 <= repeat < seg.repeats:
                mine = [
                    jax.tree.map(lambda a, r=repeat: a[r], tree.get(seg.name, {}).get(str(j), {}))
                    for tree in (params, buffers)
                ]
                where = Where(jnp.asarray(self._starts[number]), jnp.asarray(self._filled[number]))
                return self._layers[seg.kinds[j]].bind(*mine), where
        raise IndexError(f"layer {number} of {len(self._starts)}")

    # -- forward ------------------------------------------------------------------------------------------------

    def _where(self, seg: Segment) -> Where:
        span = slice(seg.first, seg.first + len(seg.kinds) * seg.repeats)
        grid = (seg.repeats, len(seg.kinds))
        return Where(self._starts[span].reshape(*grid, 2), self._filled[span].reshape(grid))

    def _layer(self, kind: LayerKind, buffers: dict, where: Where, segment_ids: jax.Array | None) -> Callable:
        """Function (params, prefix, bank) -> (outputs, statistics) of one layer, rematerialised as configured."""

        def run(params: dict, prefix: jax.Array, bank: jax.Array | None):
            layer: Any = self._layers[kind].bind(gather_weights(params, self._layers[kind].specs), buffers)
            middle, end, stats = layer(Depth(prefix, bank, where.filled), where.starts, segment_ids)
            return ((middle, end) if self.full else (end,)), lax.stop_gradient(stats)

        policies = jax.checkpoint_policies
        if self.remat == "none":
            return jax.checkpoint(run, policy=policies.save_anything_except_these_names(GATHERED))
        return jax.checkpoint(run, policy=policies.save_only_these_names(*SAVED_NAMES))

    def _after(self, bank: jax.Array | None, prefix: jax.Array, outputs: tuple, where: Where) -> jax.Array | None:
        """The bank after a layer: its input, and with full residuals its middle, where they open blocks."""
        if bank is None:
            return None
        bank = write_row(bank, where.filled, prefix, where.starts[0])
        if self.full:
            bank = write_row(bank, where.filled + where.starts[0].astype(jnp.int32), outputs[0], where.starts[1])
        return bank

    def _forward(self, params: dict, buffers: dict, x: jax.Array, segment_ids: jax.Array | None, tape: "_Tape | None"):
        """Runs all segments; with a tape, also returns each segment's residuals."""
        bank = jnp.zeros((self.rows, *x.shape), x.dtype) if self.banked else None
        stats, saved = {}, {}

        def body(seg: Segment, carry, xs):
            prefix, bank = carry
            layer_params, layer_buffers, where = xs
            kept, seen = [], []
            for j, kind in enumerate(seg.kinds):
                here = Where(where.starts[j], where.filled[j])
                layer = self._layer(kind, layer_buffers.get(str(j), {}), here, segment_ids)
                if tape is None:
                    outputs, layer_stats = layer(layer_params[str(j)], prefix, bank)
                else:
                    outputs, pull, layer_stats = jax.vjp(layer, layer_params[str(j)], prefix, bank, has_aux=True)
                    kept.append(tape.record((seg.name, j), pull, layer_params[str(j)], bank, segment_ids))
                bank = self._after(bank, prefix, outputs, here)
                prefix = outputs[-1]
                seen.append(layer_stats)
            return (prefix, bank), (kept, seen)

        carry = (x, bank)
        for seg in self.segments:
            xs = (params[seg.name], buffers.get(seg.name, {}), jax.tree.map(jnp.asarray, self._where(seg)))
            carry, (saved[seg.name], stats[seg.name]) = lax.scan(lambda c, x, seg=seg: body(seg, c, x), carry, xs)
        return (*carry, stats), saved

    def __call__(
        self, params: dict, buffers: dict, x: jax.Array, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, dict[str, jax.Array]]:
        """Runs the layers on x [B, T, D].

        Args:
          params, buffers: as :meth:`init` returns them, parameters in the compute dtype.
          segment_ids: [B, T] int32, 0 for padding; None for one document a row.

        Returns:
          The running sum [B, T, D], the bank [N, B, T, D] (None without attention residuals; all rows filled), and
          statistics: name to array [layers that have it, ...] in layer order. Statistics carry no gradient.
        """
        tape = _Tape()

        @jax.custom_vjp
        def run(params, buffers, x, segment_ids):
            return self._forward(params, buffers, x, segment_ids, None)[0]

        def forward(params, buffers, x, segment_ids):
            out, saved = self._forward(params, buffers, x, segment_ids, tape)
            return out, (params, saved, out[1], segment_ids)

        def backward(residuals, cotangents):
            params, saved, bank, segment_ids = residuals
            d_params, d_x = self._backward(params, saved, bank, segment_ids, cotangents, tape)
            return d_params, None, d_x, None

        run.defvjp(forward, backward)
        prefix, bank, stats = run(params, buffers, x, segment_ids)
        return prefix, bank, self._in_layer_order(stats)

    # -- backward -----------------------------------------------------------------------------------------------

    def _backward(
        self,
        params: dict,
        saved: dict,
        bank: jax.Array | None,
        segment_ids: jax.Array | None,
        cotangents,
        tape: "_Tape",
    ):
        """Gradients of parameters and input; the bank's gradient is one wide buffer over all layers."""
        d_prefix, d_bank, _ = cotangents
        d_bank = None if d_bank is None else wide(d_bank)

        def body(seg: Segment, carry, xs):
            d_prefix, d_bank = carry
            layer_params, kept, where = xs
            d_params = {}
            for j in reversed(range(len(seg.kinds))):
                starts, filled = where.starts[j], where.filled[j]
                d_outputs: tuple = (d_prefix,)
                d_written = jnp.zeros((), d_prefix.dtype)
                if d_bank is not None:
                    if self.full:
                        d_middle, d_bank = take_row(d_bank, filled + starts[0].astype(jnp.int32), starts[1])
                        d_outputs = (d_middle.astype(d_prefix.dtype), d_prefix)
                    d_written, d_bank = take_row(d_bank, filled, starts[0])
                pull = tape.replay((seg.name, j), kept[j], layer_params[str(j)], bank, segment_ids)
                d_params[str(j)], d_prefix, d_read = pull(d_outputs)
                if d_bank is not None:
                    d_bank = d_bank + wide(d_read)
                    d_prefix = (wide(d_prefix) + d_written).astype(d_prefix.dtype)
            return (d_prefix, d_bank), d_params

        d_params, carry = {}, (d_prefix, d_bank)
        for seg in reversed(self.segments):
            xs = (params[seg.name], saved[seg.name], jax.tree.map(jnp.asarray, self._where(seg)))
            carry, d_params[seg.name] = lax.scan(lambda c, x, seg=seg: body(seg, c, x), carry, xs, reverse=True)
        return {name: d_params[name] for name in params}, carry[0]

    # -- statistics and decoding --------------------------------------------------------------------------------

    def _in_layer_order(self, stats: dict) -> dict[str, jax.Array]:
        """Per-segment statistics [R, ...] as one array a name, layers first to last."""
        pieces: dict[str, list[tuple[list[int], jax.Array]]] = {}
        for seg in self.segments:
            for j, named in enumerate(stats[seg.name]):
                for name, value in named.items():
                    numbers = [seg.layer(r, j) for r in range(seg.repeats)]
                    pieces.setdefault(name, []).append((numbers, value))
        out = {}
        for name, parts in pieces.items():
            order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
            out[name] = jnp.concatenate([value for _, value in parts])[order]
        return out

    def by_layer(self, has: Callable[[LayerKind], bool]) -> dict[str, dict[str, np.ndarray]]:
        """For the layers of some kinds: {segment: {position: [R] their index among all such layers}}.

        It leads from a statistic [layers that have it, ...] back to the layers' own parameters.
        """
        numbers = [
            n
            for seg in self.segments
            for r in range(seg.repeats)
            for j, kind in enumerate(seg.kinds)
            if has(kind)
            for n in [seg.layer(r, j)]
        ]
        rank = {number: i for i, number in enumerate(sorted(numbers))}
        return {
            seg.name: {
                str(j): np.asarray([rank[seg.layer(r, j)] for r in range(seg.repeats)])
                for j, kind in enumerate(seg.kinds)
                if has(kind)
            }
            for seg in self.segments
        }

    def init_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> dict:
        """Empty decode caches of every layer, stacked like the parameters."""

        def one(kind: LayerKind, repeats: int):
            layer: Any = self._layers[kind].module
            cache = layer.mixer.init_cache(batch, capacity, dtype)
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (repeats, *a.shape)), cache)

        return {seg.name: {str(j): one(kind, seg.repeats) for j, kind in enumerate(seg.kinds)} for seg in self.segments}

    def extend(
        self, params: dict, buffers: dict, x: jax.Array, valid: jax.Array, cache: dict
    ) -> tuple[jax.Array, jax.Array | None, dict]:
        """Runs T new tokens x [B, T, D] after those in ``cache``; ``valid`` [B, T] bool, false only at the end.

        Returns:
          The running sum, the bank of these tokens, and the new cache.
        """
        bank = jnp.zeros((self.rows, *x.shape), x.dtype) if self.banked else None
        segment_ids = valid.astype(jnp.int32)

        def body(seg: Segment, carry, xs):
            prefix, bank = carry
            layer_params, layer_buffers, layer_cache, where = xs
            new = {}
            for j, kind in enumerate(seg.kinds):
                here = Where(where.starts[j], where.filled[j])
                layer: Any = self._layers[kind].bind(layer_params[str(j)], layer_buffers.get(str(j), {}))

                def mixer(h, _, layer=layer, j=j):
                    y, new[str(j)] = layer.mixer.extend(h, valid, layer_cache[str(j)])
                    return y, {}

                middle, end, _ = layer(Depth(prefix, bank, here.filled), here.starts, segment_ids, mixer)
                bank = self._after(bank, prefix, (middle, end), here)
                prefix = end
            return (prefix, bank), new

        carry, out = (x, bank), {}
        for seg in self.segments:
            xs = (
                params[seg.name],
                buffers.get(seg.name, {}),
                cache[seg.name],
                jax.tree.map(jnp.asarray, self._where(seg)),
            )
            carry, out[seg.name] = lax.scan(lambda c, x, seg=seg: body(seg, c, x), carry, xs)
        return (*carry, out)


class _Tape:
    """Keeps how each layer's pullback is put together, so that what the backward pass has anyway is not saved.

    A pullback (``jax.vjp``'s result) is a pytree of residual arrays. Those that *are* the layer's parameters, the
    bank or the segment ids are recognised by identity and left out; :meth:`replay` puts the backward pass's own
    (for the bank: the final one) in their place.
    """

    def __init__(self):
        self._recipes: dict[tuple[str, int], tuple[Any, list[tuple[str, int]]]] = {}

    def record(self, where: tuple[str, int], pull, params, bank, segment_ids) -> list[jax.Array]:
        """Notes the pullback's structure; returns the residuals that must be saved."""
        known = {id(leaf): ("params", i) for i, leaf in enumerate(jax.tree.leaves(params))}
        known |= {id(bank): ("bank", 0)} if bank is not None else {}
        known |= {id(segment_ids): ("segment_ids", 0)} if segment_ids is not None else {}
        leaves, structure = jax.tree.flatten(pull)
        kept, tags = [], []
        for leaf in leaves:
            tag = known.get(id(leaf), ("kept", len(kept)))
            if tag[0] == "kept":
                kept.append(leaf)
            tags.append(tag)
        self._recipes[where] = (structure, tags)
        return kept

    def replay(self, where: tuple[str, int], kept: list[jax.Array], params, bank, segment_ids):
        """The pullback again, in the backward pass."""
        structure, tags = self._recipes[where]
        sources = {"params": jax.tree.leaves(params), "bank": [bank], "segment_ids": [segment_ids], "kept": kept}
        return jax.tree.unflatten(structure, [sources[kind][i] for kind, i in tags])
