"""A run over two sources as a person starts it: stores, resume, branch, evaluate, replay, and a source that ends."""

import json
import shutil
from pathlib import Path

import pytest
import tiny
import yaml

from k3train.cli.main import main
from k3train.config.exit_codes import ExitCode

from .test_run import k3train, metrics, state_hash

LOSS, NORM, HASH = "train/loss", "train/grad_norm", "data/batch_hash"
PHASES = [{"tokens": 0, "weights": {"a": 0.75, "b": 0.25}}, {"tokens": 300, "weights": {"a": 0.5, "b": 0.5}}]


def mixed(folder: Path, phases: list[dict] = PHASES, **limits: int) -> Path:
    """An experiment file of four steps of four rows; the second phase begins with step 3 of them."""
    for seed, name in enumerate("ab"):
        tiny.write_text(folder / name, seed=seed)
    sources = {
        name: {
            "store": str(folder / f"store-{name}"),
            "source": {"files": [str(folder / name / "text" / "*.jsonl")]},
            "max_epochs": limits.get(name),
        }
        for name in "ab"
    }
    data = {"store": None, "source": None, "sources": sources, "mixture": {"block": 4, "phases": phases}}
    exp = tiny.experiment(folder, model=tiny.SHALLOW, data=data)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return file


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("mixture")
    done = k3train("train", mixed(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "sources at the end" in done.stdout
    return folder


def test_resumed_in_the_middle_is_bit_equal(whole: Path, tmp_path: Path):
    """Where the last checkpoint is gone, the run goes on from the one before and repeats what came after."""
    run = tmp_path / "run"
    shutil.copytree(whole / "run", run)
    shutil.rmtree(run / "checkpoints" / "4")
    done = k3train("train", whole / "run.yaml", f"run.dir={run}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "at step 2" in done.stdout and "mixture is not what it was" not in done.stdout
    for name in (LOSS, NORM, HASH, "eval/holdout/loss"):
        assert metrics(run, name) == metrics(whole / "run", name), name
    assert state_hash(run, 4) == state_hash(whole / "run", 4)


def test_evaluate_and_replay(whole: Path):
    scored = k3train("evaluate", whole / "run", "--json")
    assert scored.returncode == 0, scored.stderr[-3000:]
    found = json.loads(scored.stdout)
    assert found["loss"] == pytest.approx(metrics(whole / "run", "eval/holdout/loss")[4], rel=1e-5)
    sources = found["sources"]
    assert sum(one["tokens"] for one in sources.values()) == found["tokens"]
    assert sum(one["tokens"] * one["loss"] for one in sources.values()) == pytest.approx(
        found["tokens"] * found["loss"]
    )
    for name in "ab":
        told = metrics(whole / "run", f"eval/holdout-{name}/loss")[4]
        assert sources[name]["loss"] == pytest.approx(told, rel=1e-5) and told > 0
        assert list(metrics(whole / "run", f"data/epoch/{name}")) == [1, 2, 3, 4]
    replayed = k3train("replay", whole / "run", "--step", 4, "--json", "--times", 1)
    assert replayed.returncode == 0, replayed.stderr[-3000:]
    result = json.loads(replayed.stdout)
    assert all(step["same_batch"] and step["difference"] == 0 for step in result["steps"])
    assert sorted(row["source"] for row in result["rows"]) == ["a", "a", "b", "b"]


def test_another_mixture_is_a_branch(whole: Path):
    """And where it changes what was read already, that is said; a source that is used up ends the run."""
    other = [{"tokens": 0, "weights": {"a": 0.5, "b": 0.5}}]
    changed = [f"data.mixture.phases={json.dumps(other)}", "data.sources.b.max_epochs=1", "train.steps=1000"]
    refused = k3train("train", whole / "run.yaml", *changed)
    assert refused.returncode == ExitCode.RUN_FOLDER
    assert "may differ on a branch only" in refused.stderr and "data.mixture.phases: was" in refused.stderr
    file = whole / "run.yaml"
    done = k3train("train", file, *changed, "checkpoint.every=0", "--branch", "other", timeout=400)
    assert done.returncode == ExitCode.DATA_EXHAUSTED, done.stdout[-2000:] + done.stderr[-3000:]
    assert "mixture is not what it was" in done.stdout
    assert "source b is used up" in done.stdout and "the data is used up after" in done.stdout


def test_data_commands_show_every_source(whole: Path, capsys: pytest.CaptureFixture):
    file = str(whole / "run.yaml")
    assert main(["data", "prepare", file]) == 0
    shown = capsys.readouterr().out
    assert f"token store {whole / 'store-a'}" in shown and f"token store {whole / 'store-b'}" in shown
    assert "each block of 4 samples" in shown and "from sample 12" in shown
    assert main(["data", "inspect", file, "--rows", "4", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("(a, epoch 0") == 3 and shown.count("(b, epoch 0") == 1
    assert main(["data", "inspect", file, "--holdout", "--rows", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "held-out row 0 of a" in shown and "held-out row 0 of b" in shown
    assert main(["data", "ngram", file]) == ExitCode.USAGE
    assert "give --source with one of a, b" in capsys.readouterr().err
    assert main(["data", "ngram", file, "--source", "b"]) == 0
    assert main(["data", "inspect", str(whole / "store-a"), "--rows", "0"]) == 0
    close = [*PHASES, {"tokens": 390, "weights": {"b": 1.0}}]
    longer = [f"data.mixture.phases={json.dumps(close)}", "--sequence-length", "64"]
    assert main(["data", "inspect", file, *longer]) == ExitCode.USAGE
    assert "phase 2 (tokens: 390) does not begin" in capsys.readouterr().err
    assert main(["data", "prepare", file, "data.mixture.block=1"]) == ExitCode.CONFIG
    assert "gets no row in a block of 1; set mixture.block to 4 or more" in capsys.readouterr().err
