"""One optimizer step: ``(state, batch, tokens) -> (state, metrics)``, pure, jitted once by the loop.

Shapes: A microbatches, B rows, T tokens, E experts, H heads.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.data.batch import Batch, hash_words
from k3train.experiment import Experiment
from k3train.kernels.numerics import wide
from k3train.models.config import LayerKind
from k3train.models.decoder import Decoder
from k3train.models.param import compute_copy
from k3train.models.stack import Stack
from k3train.optim.balance import update_bias
from k3train.optim.ema import update_ema
from k3train.optim.guard import judge
from k3train.optim.optimizer import Optimizer
from k3train.optim.qk_clip import qk_clip
from k3train.parallel.activations import ROWS, constrain
from k3train.parallel.axes import batch_sharding, replicated
from k3train.train.assembly import Assembly
from k3train.train.loss import batch_loss, count_tokens
from k3train.train.state import State

# How a statistic of several microbatches becomes one of the step; what is not named is averaged.
SUMMED = ("loss", "z_loss", "accuracy", "mtp_loss", "load", "histogram")
EXTREMES = {
    "max_logit": jnp.maximum,
    "decay_min": jnp.minimum,
    "rank_load": jnp.maximum,
    "redundant": jnp.maximum,
    "rounds": jnp.maximum,
}


def _statistic(name: str) -> str:
    """The name without the prediction layer's prefix; ``mtp_loss`` is a name of its own."""
    return name if name == "mtp_loss" else name.removeprefix("mtp_")


def _merge(name: str, a: jax.Array, b: jax.Array, microbatches: int) -> jax.Array:
    """Adds microbatch value ``b`` to the running ``a``."""
    name = _statistic(name)
    if name in EXTREMES:
        return EXTREMES[name](a, b)
    return a + (b if name in SUMMED else b / microbatches)


def _start(name: str, value: jax.Array) -> jax.Array:
    """The running value before the first microbatch."""
    name = _statistic(name)
    if name in EXTREMES:
        return jnp.full(value.shape, -jnp.inf if EXTREMES[name] is jnp.maximum else jnp.inf, value.dtype)
    return jnp.zeros(value.shape, value.dtype)


def gradients(decoder: Decoder, exp: Experiment, params: dict, buffers: dict, batch: Batch) -> tuple[dict, dict]:
    """Float32 gradients of the global batch's mean loss, over ``train.accumulation`` microbatches.

    Args:
      params: compute copy.
      batch: global, arrays [A * B, T]; microbatch a takes rows a, a + A, ..., so that no row leaves its device.

    Returns:
      Gradients like ``params`` but float32, and the step's loss parts and statistics, with ``supervised``, the count of
      targets in the loss.
    """
    counts = count_tokens(batch)
    many = exp.train.accumulation

    def one(batch: Batch) -> tuple[dict, dict]:
        def loss(params: dict) -> tuple[jax.Array, dict]:
            return batch_loss(decoder, params, buffers, batch, counts, exp.kernels, exp.train.z_loss)

        grads, parts = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(wide, grads), parts

    if many == 1:
        grads, parts = one(batch)
        return grads, parts | {"supervised": counts.main}
    split = jax.tree.map(lambda x: _microbatches(x, many), batch)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[0])
    start = {name: _start(name, value) for name, value in shapes[1].items()}

    def add(carry: tuple[dict, dict], batch: Batch) -> tuple[tuple[dict, dict], None]:
        grads, parts = one(batch)
        merged = {name: _merge(name, value, parts[name], many) for name, value in carry[1].items()}
        return (jax.tree.map(jnp.add, carry[0], grads), merged), None

    grads, parts = jax.lax.scan(add, (zeros, start), split)[0]
    return grads, parts | {"supervised": counts.main}


def _microbatches(x: jax.Array, many: int) -> jax.Array:
    """[A * B, T] -> [A, B, T], rows where they are."""
    return constrain(x.reshape(-1, many, *x.shape[1:]).swapaxes(0, 1), None, ROWS, "context")


def _stacks(decoder: Decoder) -> list[tuple[str, Stack, str]]:
    """(key of the parameters, stack, prefix of its statistics) of every stack."""
    return [(name, stack, "" if name == "layers" else "mtp_") for name, stack in decoder.stacks.items()]


def balance(decoder: Decoder, exp: Experiment, buffers: dict, parts: dict) -> dict:
    """Router biases for the next step, from this step's loads and histograms (k3-facts 5.3)."""
    moe = decoder.cfg.moe
    if moe is None or exp.optim.balance.kind == "none":
        return buffers
    for name, stack, prefix in _stacks(decoder):
        load = parts.get(f"{prefix}load")
        if load is None:
            continue
        histogram = parts.get(f"{prefix}histogram")
        for seg, positions in stack.by_layer(lambda kind: kind.ffn == "moe").items():
            for j, index in positions.items():
                ffn = buffers[name][seg][j]["ffn"]
                bias = update_bias(
                    ffn["router_bias"],
                    None if histogram is None else histogram[index],
                    load[index],
                    exp.optim.balance,
                    moe.top_k,
                )
                buffers = _put(buffers, (name, seg, j, "ffn", "router_bias"), bias)
    return buffers


def clip_logits(decoder: Decoder, exp: Experiment, params: dict, parts: dict) -> tuple[dict, dict]:
    """QK-Clip of every MLA layer whose heads exceeded ``optim.qk_clip`` (k3-facts 9.1); returns metrics too."""
    mla, tau = decoder.cfg.mla, exp.optim.qk_clip
    if mla is None or tau is None:
        return params, {}
    clipped, least = jnp.int32(0), jnp.float32(1)
    for name, stack, prefix in _stacks(decoder):
        for seg, positions in stack.by_layer(lambda kind: kind.mixer == "mla").items():
            for j, index in positions.items():
                mixer, heads, gamma = qk_clip(
                    params[name][seg][j]["mixer"], parts[f"{prefix}max_logit"][index], tau, mla
                )
                params = _put(params, (name, seg, j, "mixer"), mixer)
                clipped, least = clipped + heads.astype(jnp.int32), jnp.minimum(least, gamma)
    return params, {"attn/qk_clip_heads": clipped, "attn/qk_clip_min_gamma": least}


def _put(tree: dict, path: tuple[str, ...], value) -> dict:
    """``tree`` with ``value`` at ``path``; the dicts on the way are new, the rest is shared."""
    return {**tree, path[0]: value if len(path) == 1 else _put(tree[path[0]], path[1:], value)}


def build_train_step(
    decoder: Decoder, optimizer: Optimizer, exp: Experiment, total_tokens: int
) -> Callable[[State, Batch, jax.Array], tuple[State, dict]]:
    """The train step as a pure function.

    Args:
      total_tokens: nominal tokens of the whole run; the schedule's end.

    Returns:
      ``step(state, batch, tokens)``: ``tokens`` is the float32 count of nominal tokens seen *after* this step.
      A step that the guard does not accept changes nothing but the step count and the list of skipped steps.
    """
    specs, dtype = decoder.specs(), jnp.dtype(exp.train.compute_dtype)

    def step(state: State, batch: Batch, tokens: jax.Array) -> tuple[State, dict]:
        params, buffers = state["params"], state["buffers"]
        grads, parts = gradients(decoder, exp, compute_copy(params, specs, dtype), buffers, batch)
        new_params, opt, metrics = optimizer.update(grads, state["opt"], params, tokens, total_tokens)
        new_params, clip_metrics = clip_logits(decoder, exp, new_params, parts)
        number = state["step"] + 1
        update_norms = {group: metrics[f"update_norm/{group}"] for group in optimizer.groups}
        verdict = judge(exp.optim.guard, state["guard"], number, parts["loss"], metrics["grad_norm"], update_norms)

        def keep(new: Any, old: Any) -> Any:
            # Selecting element by element fuses with the update and leaves donated buffers in place.
            return jax.tree.map(lambda a, b: jnp.where(verdict.accept, a, b), new, old)

        new = {
            "step": number,
            "params": keep(new_params, params),
            "opt": keep(opt, state["opt"]),
            "buffers": keep(balance(decoder, exp, buffers, parts), buffers),
            "guard": verdict.state,
        }
        if exp.optim.ema is not None:
            new["ema"] = keep(update_ema(state["ema"], new["params"], exp.optim.ema), state["ema"])
        return new, {
            "parts": {name: value for name, value in parts.items() if not name.endswith("histogram")},
            "optim": metrics | {"param_norm": optax.tree.norm(new["params"])} | verdict.flags,
            "guard": verdict.measures,
            "halt": verdict.halt,
            "clip": clip_metrics,
            "data": batch_facts(batch),
            "router_bias": router_biases(decoder, new["buffers"]),
        }

    return step


def compile_step(parts: Assembly) -> Callable[[State, Batch, jax.Array], tuple[State, dict]]:
    """The train step of a run, compiled for its mesh (call it with the mesh set); the state given to it is used up."""
    step = build_train_step(parts.decoder, parts.optimizer, parts.exp, parts.total_tokens)
    rows, length = parts.exp.train.global_batch, parts.exp.data.sequence_length
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=batch_sharding(parts.mesh))
    mask = jax.ShapeDtypeStruct((rows, length), jnp.bool_, sharding=ids.sharding)
    # Left to itself, XLA may keep metrics of sharded arrays sharded, and a process could not read the others' part.
    whole = jax.jit(step, donate_argnums=0, out_shardings=(parts.factory.shardings, replicated(parts.mesh)))
    tokens = jax.ShapeDtypeStruct((), jnp.float32)
    return whole.lower(parts.factory.abstract, Batch(ids, ids, ids, mask), tokens).compile()


def compile_steps(parts: Assembly, first: int) -> dict[tuple[int, int, int], Callable]:
    """:func:`compile_step` for each shape of the steps that follow ``first`` steps, by ``Leg.shape``.

    All of them at once: that a later one does not fit the device should not come out in the middle of a run.
    """
    legs = parts.course.legs
    ends = [*(leg.step for leg in legs[1:]), parts.steps]
    ahead = [leg for leg, end in zip(legs, ends, strict=True) if leg.step < parts.steps and first < end]
    return {leg.shape: compile_step(parts.shaped(leg)) for leg in {leg.shape: leg for leg in ahead}.values()}


def batch_facts(batch: Batch) -> dict[str, jax.Array]:
    """What the devices were given: ``hash`` uint32 [2] (``data/batch.py``), ``pad_frac`` and ``docs_per_row``."""
    return {
        "hash": hash_words(batch.tokens, batch.segment_ids, jnp),
        "pad_frac": jnp.mean(batch.segment_ids == 0, dtype=jnp.float32),
        "docs_per_row": jnp.mean(jnp.max(batch.segment_ids, axis=1), dtype=jnp.float32),
    }


def router_biases(decoder: Decoder, buffers: dict) -> jax.Array:
    """Router biases [layers with experts, E] in layer order; [0, 0] where there are none."""

    def is_moe(kind: LayerKind) -> bool:
        return kind.ffn == "moe"

    pieces, order = [], []
    for seg, positions in decoder.stacks["layers"].by_layer(is_moe).items():
        for j, index in positions.items():
            pieces.append(buffers["layers"][seg][j]["ffn"]["router_bias"])
            order.extend(index)
    if not pieces:
        return jnp.zeros((0, 0), jnp.float32)
    return jnp.concatenate(pieces)[jnp.argsort(jnp.asarray(order))]
