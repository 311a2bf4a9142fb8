"""One step on many meshes against one device; run by test_parity.py with eight forced CPU devices in all.

All begin with weights drawn once; that meshes draw alike is tests/train/test_step.py's.

Usage: parity.py FILE MESH [MESH ...], a mesh as axis=size,axis=size. FILE gets one JSON line a mesh, the one device's
first (standard output belongs to the collectives' library). Where the K3TRAIN variables of several processes are set,
the devices are theirs together, and the first process writes.
"""

import json
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parent.parent))
import compile_once
import tiny

from k3train.data.batch import Batch
from k3train.models.parts.moe import layer as moe_layer
from k3train.models.parts.router.layer import Routing
from k3train.parallel import distributed
from k3train.parallel.axes import batch_sharding
from k3train.parallel.mesh import build_mesh
from k3train.train.assembly import Assembly, assemble
from k3train.train.loss import batch_loss, count_tokens
from k3train.train.step import gradients

ROWS, TOKENS = 8, 48
# Heads, widths and experts that every axis of up to four devices divides; three layers of experts.
MODEL = {
    **tiny.MODEL,
    "kda": {"num_heads": 4, "head_dim": 8},
    "mla": {**tiny.MODEL["mla"], "num_heads": 4},
    "layers": {"count": 4, "kda": [1, 2, 3], "mla": [4], "first_dense": 1},
}


def packed_batch(seed: int = 0) -> Batch:
    """Documents of 1 to 30 tokens that begin anywhere, padding at the end of every second row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (ROWS, TOKENS)).astype(np.int32)
    ids = np.stack([np.repeat(np.arange(1, TOKENS + 1), rng.integers(1, 30, TOKENS))[:TOKENS] for _ in range(ROWS)])
    ids = ids.astype(np.int32)
    ids[::2, 43:] = 0
    mask = (np.roll(ids, -1, 1) == ids) & (ids > 0)
    mask[:, -1] = False
    return Batch(tokens, np.where(mask, np.roll(tokens, -1, 1), 0).astype(np.int32), ids, mask)


def prepared(mesh: dict[str, int]) -> Assembly:
    """The parts of a run on the mesh; no axis is one device, this process's own."""
    exp = tiny.experiment(
        Path("unused"),
        model=MODEL,
        mesh={"replica": 1, **mesh},
        train={"global_batch": ROWS},
        data={"store": "unused", "sequence_length": TOKENS},
        kernels={"kda_chunk": 8, "attention_block": 16, "grouped_matmul_block": 16},
    )
    return assemble(exp, build_mesh(exp.mesh, devices(int(np.prod(list(mesh.values()) or [1])))))


@cache
def fresh() -> tuple[dict, dict]:
    """(parameters, buffers) as every device by itself draws them, on the host."""
    state = prepared({"replica": jax.device_count()}).factory.fresh(0)
    return jax.device_get((state["params"], state["buffers"]))


def laid_out(parts: Assembly) -> tuple[dict, dict, Batch]:
    """(parameters, buffers, batch) on the mesh."""
    put = lambda a, sharding: jax.make_array_from_callback(a.shape, sharding, lambda part: a[part])  # noqa: E731
    shardings = parts.factory.shardings["params"], parts.factory.shardings["buffers"]
    batch = jax.tree.map(lambda a: put(a, batch_sharding(parts.mesh)), packed_batch())
    return *jax.tree.map(put, fresh(), shardings), batch


def step(mesh: dict[str, int]) -> tuple[dict, dict]:
    """(gradients, loss parts) of the first batch, on the host."""
    parts = prepared(mesh)
    with jax.set_mesh(parts.mesh):
        run = jax.jit(lambda params, buffers, batch: gradients(parts.decoder, parts.exp, params, buffers, batch))
        found = run(*laid_out(parts))
        if mesh and distributed.process_count() > 1:
            found = jax.jit(lambda x: x, out_shardings=NamedSharding(parts.mesh, PartitionSpec()))(found)
        return jax.device_get(found)


def devices(count: int) -> list[jax.Device]:
    """Equally many of every process; one is this process's own."""
    return jax.local_devices()[:1] if count == 1 else jax.devices()[:: jax.device_count() // count]


def compare(got: tuple[dict, dict], want: tuple[dict, dict]) -> dict:
    """How far two steps are apart."""
    worst, where = 0.0, ""
    for (path, a), b in zip(jax.tree.leaves_with_path(got[0]), jax.tree.leaves(want[0]), strict=True):
        apart = float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
        if apart > worst:
            worst, where = apart, jax.tree_util.keystr(path)
    loss = float(abs(got[1]["loss"] - want[1]["loss"]) / abs(want[1]["loss"]))
    same = all(np.array_equal(got[1][name], want[1][name]) for name in ("load", "histogram"))
    near = all(np.allclose(got[1][name], want[1][name], rtol=1e-4) for name in want[1] if name != "histogram")
    return {"loss": loss, "gradient": worst, "at": where, "same_routing": same, "near_statistics": near}


def margin() -> float:
    """Least distance, over all tokens and layers on one device, between the last chosen and the first not chosen."""
    found, parts = [], prepared({})

    def watched(self, routing: Routing, valid, bias, axes):
        biased = routing.scores + bias[None]
        chosen = jnp.take_along_axis(biased, routing.ids, axis=1).min(axis=1)
        jax.debug.callback(lambda gap: found.append(float(gap)), jnp.min(chosen - routing.cutoff))
        return really(self, routing, valid, bias, axes)

    def loss(params, buffers, batch):
        return batch_loss(parts.decoder, params, buffers, batch, count_tokens(batch), parts.exp.kernels, 0.0)

    really, moe_layer.MoE._stats = moe_layer.MoE._stats, watched
    try:
        with jax.set_mesh(parts.mesh):
            jax.block_until_ready(jax.jit(loss)(*laid_out(parts)))
        jax.effects_barrier()
        return min(found)
    finally:
        moe_layer.MoE._stats = really


def note(row: dict) -> None:
    """A line of the file."""
    with Path(sys.argv[1]).open("a") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    distributed.initialize(peer_timeout_s=1800)
    compile_once.share_programs()
    fresh()
    if distributed.process_index() == 0:
        want = step({})
        note({"mesh": "one device", "loss": float(want[1]["loss"]), "margin": margin()})
    for text in sys.argv[2:]:
        mesh = {axis: int(size) for axis, size in (part.split("=") for part in text.split(","))}
        found = step(mesh)
        if distributed.process_index() == 0:
            note({"mesh": text, **compare(found, want)})


if __name__ == "__main__":
    main()
