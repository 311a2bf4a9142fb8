"""Whether a resumed run has the bits of one that never stopped, and what strict determinism costs.

    python scripts/bench/determinism.py OUT [--steps 40] [--layers 4]

For each setting a run goes to its end; then its folder is copied, the checkpoints after its middle are taken away, and
the copy goes on in a new process, compiling anew. Prints steps whose loss or gradient norm differ, arrays of the last
state whose hash differs, and the median step time. Rows: strict; off; off with ``xla_gpu_deterministic_ops``, which
turns autotuning off.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent.parent
SETTINGS = {
    "strict": ("strict", ""),
    "off": ("off", ""),
    "off, xla_gpu_deterministic_ops": ("off", "--xla_gpu_deterministic_ops=true"),
}
KEYS = ("train/loss", "train/grad_norm", "data/batch_hash")


def main() -> None:
    """Runs all settings and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "k3train").rglob("*.py")))
    (args.out / "text.txt").write_text(text * 10)
    print("| setting | differing steps | differing arrays | ms a step (median) | compile, s |\n|---|---|---|---|---|")
    for number, (name, (determinism, flags)) in enumerate(SETTINGS.items()):
        whole, again = args.out / f"{number}-whole", args.out / f"{number}-again"
        train(experiment(args, whole, determinism), flags)
        halve(whole, again, args.steps // 2)
        train(experiment(args, again, determinism), flags)
        one, other = lines(whole), lines(again)
        steps = [step for step in one if any(one[step].get(key) != other[step].get(key) for key in KEYS)]
        a, b = state(whole, args.steps), state(again, args.steps)
        arrays = [key for key in a if a[key] != b[key]]
        times = [line["perf/step_s"] for step, line in one.items() if step > 10 and "perf/step_s" in line]
        compiled = next(line["perf/compile_s"] for line in one.values() if "perf/compile_s" in line)
        print(
            f"| {name} | {len(steps)} of {args.steps - args.steps // 2} | {len(arrays)} of {len(a)} "
            f"| {1000 * statistics.median(times):.1f} | {compiled:.0f} |",
            flush=True,
        )


def experiment(args: argparse.Namespace, run: Path, determinism: str) -> Path:
    """The file of a run of the 400M model with few layers over this repository's own text."""
    kinds = [i for i in range(1, args.layers + 1) if i % 4], [i for i in range(1, args.layers + 1) if i % 4 == 0]
    content = {
        "extends": str(ROOT / "configs/experiments/k3_400m.yaml"),
        "run": {"dir": str(run), "determinism": determinism},
        "model": {"layers": {"count": args.layers, "kda": kinds[0], "mla": kinds[1]}},
        "data": {
            "store": str(args.out / "store"),
            "source": {"corpus": None, "files": [str(args.out / "*.txt")]},
        },
        "train": {"steps": args.steps},
        "checkpoint": {"every": args.steps // 2, "keep": 9},
        "eval": {"every": 0, "max_rows": 8},
        "sample": {"prompts": []},
    }
    file = args.out / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def train(file: Path, flags: str) -> None:
    """One attempt in a process of its own, without any cache of compiled programs."""
    env = os.environ | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    done = subprocess.run(
        [sys.executable, "-m", "k3train", "train", str(file)], env=env, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{file} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def halve(whole: Path, again: Path, middle: int) -> None:
    """A copy of a run folder as it was after its checkpoint in the middle."""
    shutil.copytree(whole, again)
    for folder in (again / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > middle:
            shutil.rmtree(folder)


def lines(run: Path) -> dict[int, dict]:
    """The metrics by step."""
    found: dict[int, dict] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        found.setdefault(line["step"], {}).update(line)
    return found


def state(run: Path, step: int) -> dict[str, str]:
    """The hash of every array of a checkpoint."""
    return json.loads((run / "checkpoints" / str(step) / "manifest.json").read_text())["state_hash"]["arrays"]


if __name__ == "__main__":
    main()
