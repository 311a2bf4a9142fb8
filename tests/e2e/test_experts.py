"""Runs whose experts are spread over devices and processes: the same losses, and a first step that is looked at."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import yaml
from launch import NO_COMPILATION, Launched, values

from k3train.config.exit_codes import ExitCode

# For ``before``: the copies of tokens reach the experts with another order of their widths.
ASTRAY = """
from k3train.parallel.moonep import travel
rightly = travel.deliver
def wrongly(wire, layout, sizes, tokens, weights):
    rows, weight, first = rightly(wire, layout, sizes, tokens, weights)
    return tuple(x[:, ::-1] for x in rows), weight, first
travel.deliver = wrongly
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text, store and experiment file of the runs here."""
    made = tmp_path_factory.mktemp("experts")
    tiny.write_text(made)
    exp = tiny.experiment(
        made, model=tiny.SHALLOW, train={"steps": 3}, mesh={"replica": 1}, moonep={"transport": "padded"}
    )
    (made / "run.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    return made


def launched(folder: Path, name: str, *overrides: str, count: int = 1, devices: int = 1, before=()) -> Launched:
    given = (f"run.dir={folder / name}", *overrides)
    return Launched(folder / f"{name}-logs", folder / "run.yaml", *given, count=count, devices=devices, before=before)


@pytest.mark.slow
def test_two_processes_with_an_expert_shard_each_train_as_one_device_does(folder: Path):
    with launched(folder, "one") as run:
        assert run.codes() == [0], run.logs()
    with launched(folder, "two", "mesh.expert=2", "moonep.check=true", count=2) as run:
        assert run.codes() == [0, 0], run.logs()
        assert "experts over 2 devices against all on each: largest relative difference" in run.log(), run.logs()
    assert values(folder / "two", "data/batch_hash") == values(folder / "one", "data/batch_hash")
    losses = [values(folder / name, "train/loss") for name in ("one", "two")]
    assert len(losses[0]) == 3
    np.testing.assert_allclose([*losses[1].values()], [*losses[0].values()], rtol=1e-5)


@pytest.mark.slow
def test_experts_whose_tokens_go_astray_end_the_run(folder: Path):
    with launched(
        folder, "astray", "mesh.expert=2", "moonep.check=true", devices=2, before=[NO_COMPILATION + ASTRAY]
    ) as run:
        assert run.codes() == [ExitCode.BUG], run.logs()
        assert "the experts' tokens do not arrive as they should" in run.log(), run.logs()
    assert not (folder / "astray" / "metrics.jsonl").exists() or not values(folder / "astray", "train/loss")
