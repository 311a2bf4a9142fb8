"""What scripts/chaos.py damages, and how: the experiment, its surroundings, reading what a run left, the damages."""

import json
import os
import random
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from etils import epath

from k3train.checkpoint.layout import FOLDER, scan
from k3train.parallel.distributed import COORDINATOR, NUM_PROCESSES, PROCESS_ID

STEPS, EVERY = 40, 5
DAMAGED = "damaged.txt"
"""Beside a run's folder: the checkpoints that were damaged."""
DAMAGES = ("flip", "cut", "remove", "empty")

# One layer of each kind: an attempt spends its time compiling.
MODEL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "layers": {"count": 2, "kda": [1], "mla": [2], "first_dense": 1},
    "kda": {"num_heads": 2, "head_dim": 16},
    "mla": {
        "num_heads": 2,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_shared_head_dim": 8,
        "v_head_dim": 16,
    },
    "ffn": {"intermediate_size": 48},
    "moe": {"num_experts": 8, "top_k": 2, "intermediate_size": 16, "num_shared": 1, "latent_size": 16},
    "attn_residual": {"kind": "block", "block_size": 2},
}


@dataclass(frozen=True)
class Layout:
    """Processes, forced CPU devices of each, and the mesh over them."""

    processes: int
    devices: int
    mesh: dict[str, int]

    def __str__(self) -> str:
        return f"{self.processes}x{self.devices} {','.join(f'{k}={v}' for k, v in self.mesh.items())}"


ONE = Layout(1, 1, {"replica": 1})
LAYOUTS = (
    ONE,
    Layout(1, 2, {"replica": 2}),
    Layout(1, 2, {"replica": 1, "fsdp": 2}),
    Layout(2, 1, {"replica": 2}),
    Layout(2, 1, {"replica": 1, "fsdp": 2}),
)


def experiment(folder: Path) -> dict:
    """The experiment file's content."""
    return {
        "run": {"dir": str(folder / "run"), "peer_timeout_s": 10.0},
        "model": MODEL,
        "data": {
            "store": str(folder / "store"),
            "sequence_length": 64,
            "holdout": 0.2,
            "source": {"files": [str(folder / "text" / "*.jsonl")]},
        },
        "train": {"steps": STEPS, "global_batch": 8, "accumulation": 2, "compute_dtype": "float32"},
        "optim": {"muon": {"lr": 0.01, "dtype": "float32"}, "ema": 0.9},
        "kernels": {"kda_chunk": 16, "attention_block": 32, "grouped_matmul_block": 16},
        "checkpoint": {"every": EVERY, "keep": 4, "max_failures": 2},
    }


def write_text(folder: Path) -> None:
    """Made-up documents, always the same."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(60)]
    folder.mkdir(parents=True, exist_ok=True)
    texts = [" ".join(rng.choices(words, k=rng.randint(1, 80))) for _ in range(200)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def environ(folder: Path, layout: Layout, index: int, port: int) -> dict[str, str]:
    """The environment of one process of an attempt."""
    several = {COORDINATOR: f"127.0.0.1:{port}", NUM_PROCESSES: str(layout.processes), PROCESS_ID: str(index)}
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={layout.devices} --xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "PYTHONUNBUFFERED": "1",
        **(several if layout.processes > 1 else {}),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(outputs: list) -> str:
    """What the processes wrote, one after the other; closes the files."""
    texts = []
    for output in outputs:
        output.seek(0)
        texts.append(output.read())
        output.close()
    return "\n".join(texts)


def metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl; a line that is no JSON is an error."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def batch_hashes(lines: list[dict]) -> dict[int, str]:
    return {line["step"]: line["data/batch_hash"] for line in lines if "data/batch_hash" in line}


def good_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    return sorted(saved_hashes(run))


def saved_hashes(run: Path) -> dict[int, str]:
    """Hash of the state in each checkpoint, by step; those that :func:`damage` damaged are none, found out or not."""
    entries = scan(epath.Path(run) / FOLDER)
    complete = [entry for entry in entries if entry.status == "complete"]
    known = (run.parent / DAMAGED).read_text().split() if (run.parent / DAMAGED).exists() else []
    there = [(entry, _identity(entry.path)) for entry in complete]
    return {entry.step: entry.manifest["state_hash"]["all"] for entry, which in there if which and which not in known}


def _identity(folder: epath.Path | Path) -> str:
    """A folder's name, and what tells it from a later one of the same name; nothing where retention was faster."""
    try:
        return f"{folder.name}:{Path(str(folder)).stat().st_ino}"
    except FileNotFoundError:
        return ""


def final_hash(run: Path) -> str:
    """Hash of the state after the last step."""
    return saved_hashes(run).get(STEPS, "no final checkpoint")


def await_save(run: Path, known: list[int], processes: list[subprocess.Popen]) -> None:
    """Waits until a checkpoint is there that was not known before, or a process has ended."""
    while set(good_steps(run)) <= set(known) and all(process.poll() is None for process in processes):
        time.sleep(0.05)


def damage(run: Path, step: int, rng: random.Random) -> str:
    """Damages a checkpoint as disks and people do; returns how."""
    how = rng.choice(DAMAGES)
    if how == "empty":  # beside it, a folder named like a later step
        (run / FOLDER / str(step + 1)).mkdir(exist_ok=True)
        return how
    folder = next(
        Path(str(e.path)) for e in reversed(scan(epath.Path(run) / FOLDER)) if e.step == step and e.status == "complete"
    )
    with (run.parent / DAMAGED).open("a") as notes:
        notes.write(f"{_identity(folder)}\n")
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    victim = rng.choice([path for path in files if path.stat().st_size > 0])
    match how:
        case "flip":
            content = bytearray(victim.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            victim.write_bytes(content)
        case "cut":
            os.truncate(victim, victim.stat().st_size // 2)
        case _:
            victim.unlink()
    return how


def fill(path: Path) -> None:
    """Writes until the disk is full."""
    try:
        with path.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
    except OSError:
        return


def can_mount(folder: Path) -> bool:
    """Whether a tmpfs can be mounted here."""
    place = folder / "probe"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if done.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)
    place.rmdir()
    return done.returncode == 0
