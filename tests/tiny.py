"""A complete K3 that compiles in seconds, and text for it to read."""

import json
import random
from pathlib import Path

from k3train.experiment import Experiment

MODEL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "layers": {"count": 5, "kda": [1, 2, 3], "mla": [4, 5], "first_dense": 1},
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

# One layer of each kind: whole runs in processes of their own spend their time compiling.
SHALLOW = {**MODEL, "layers": {"count": 2, "kda": [1], "mla": [2], "first_dense": 1}}

KIMI_LINEAR = {
    **MODEL,
    "kda": {"num_heads": 2, "head_dim": 16, "gate": "softplus", "output_gate": "low_rank"},
    "mla": {
        "num_heads": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_shared_head_dim": 8,
        "v_head_dim": 16,
        "output_gate": False,
    },
    "moe": {"num_experts": 8, "top_k": 2, "intermediate_size": 16, "num_shared": 1, "router": {"scale": 2.446}},
    "attn_residual": {"kind": "none"},
    "activation": {"kind": "swiglu"},
}


def experiment(folder: Path, **sections) -> Experiment:
    """An experiment under ``folder``; ``sections`` update its sections key by key."""
    config = {
        "run": {"dir": str(folder / "run")},
        "model": MODEL,
        "data": {
            "store": str(folder / "store"),
            "sequence_length": 32,
            "holdout": 0.2,
            "source": {"files": [str(folder / "text" / "*.jsonl")]},
        },
        "train": {"steps": 4, "global_batch": 4, "compute_dtype": "float32", "remat": "full"},
        "optim": {"muon": {"lr": 0.01, "dtype": "float32"}},
        "kernels": {"kda_chunk": 16, "attention_block": 32, "grouped_matmul_block": 16},
        "checkpoint": {"every": 2},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    return Experiment.model_validate(config)


def write_text(folder: Path, documents: int = 60, seed: int = 0, longest: int = 60) -> None:
    """JSONL documents of up to ``longest`` made-up words of many lengths under ``folder/text``."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 7))) for _ in range(40)]
    (folder / "text").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(1, longest)))}) for _ in range(documents)]
    (folder / "text" / "a.jsonl").write_text("\n".join(lines) + "\n")
