"""A run's weights and data, looked for from anywhere: other working directories, moved folders, other stores."""

import json
import os
import shutil
from pathlib import Path

import jax
import pytest
import tiny

from k3train.checkpoint.manager import CheckpointManager
from k3train.config.errors import UserError
from k3train.data.prepare import prepare
from k3train.parallel.mesh import build_mesh
from k3train.run.directory import RunDirectory
from k3train.run.identity import STORE_KEY, TOKENIZER_KEY
from k3train.train.assembly import assemble
from k3train.train.load import load_run, open_run_data

ONE_LAYER = {"layers": {"count": 1, "kda": [1], "first_dense": 1}, "attn_residual": {"kind": "none"}}


def quiet(_: str) -> None:
    """Takes what a person would be told."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with text, a store and a run of one checkpoint, all named relative to it."""
    folder = tmp_path_factory.mktemp("project")
    tiny.write_text(folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        exp = tiny.experiment(Path(), model={**tiny.MODEL, **ONE_LAYER}, mesh={"replica": 1}).absolute()
        store = prepare(exp.data, say=quiet)
        parts = assemble(exp, build_mesh(exp.mesh, jax.devices()[:1]))
        with RunDirectory(exp.run.dir, exp.model_dump(mode="json")) as run:
            run.claim(STORE_KEY, store.fingerprint)
            run.claim(TOKENIZER_KEY, parts.tokenizer.fingerprint)
            manager = CheckpointManager(run.checkpoints, exp.checkpoint, note=quiet)
            manager.save(1, parts.factory.fresh(0), {"step": 1, "samples": 4, "tokens": 128}, block=True)
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def copied(project, tmp_path):
    """The project at another place, the old one out of reach as long as the test runs."""
    copy = shutil.copytree(project, tmp_path / "moved here")
    away = project.with_name("away")
    project.rename(away)
    yield copy
    away.rename(project)


def test_from_another_working_directory(project, tmp_path, monkeypatch):
    """On one device, however many there are."""
    monkeypatch.chdir(tmp_path)
    run = load_run(str(project / "run"), [], ema=False, say=quiet)
    assert run.step == 1 and run.parts.mesh.size == 1
    assert open_run_data(run, quiet).only.path == project / "store"


def test_a_run_that_moved_together_with_its_data(copied, monkeypatch):
    monkeypatch.chdir(copied / "run")
    run = load_run(".@1", [], ema=False, say=quiet)
    assert open_run_data(run, quiet).only.path == copied / "store"


def test_sources_that_changed_since_are_no_matter(copied):
    (copied / "text" / "a.jsonl").write_text("broken")
    assert open_run_data(load_run(str(copied / "run"), [], ema=False, say=quiet), quiet)


def test_the_store_is_gone(copied):
    shutil.rmtree(copied / "store")
    run = load_run(str(copied / "run"), [], ema=False, say=quiet)
    with pytest.raises(UserError, match=r"store is not there. Name its place \(data.store=PATH\)"):
        open_run_data(run, quiet)


def test_another_store_only_where_it_is_asked_for(copied):
    shutil.rmtree(copied / "store")
    tiny.write_text(copied, seed=1)
    exp = tiny.experiment(copied)
    prepare(exp.data, say=quiet)
    run = load_run(str(copied / "run"), [], ema=False, say=quiet)
    with pytest.raises(UserError, match=r"not the text that .* was trained on"):
        open_run_data(run, quiet)
    run = load_run(str(copied / "run"), [f"data.store={exp.data.store}"], ema=False, say=quiet)
    assert str(open_run_data(run, quiet).only.path) == exp.data.store


def test_another_tokenizer_is_refused(copied):
    file = copied / "run" / "experiment.json"
    record = json.loads(file.read_text())
    record["claimed"][TOKENIZER_KEY] = "0" * 64
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"bytes: not the tokenizer that .* was trained with"):
        load_run(str(copied / "run"), [], ema=False, say=quiet)


def test_weights_that_were_not_averaged(project):
    with pytest.raises(UserError, match=r"keeps no averaged weights \(its optim.ema is null\)"):
        load_run(str(project / "run"), [], ema=True, say=quiet)


@pytest.mark.parametrize(
    ("train", "done", "steps", "tokens"),
    [
        ({"steps": 4}, (2, 256, 256), 4, 512),
        ({"steps": 4}, (2, 512, 512), 4, 768),  # the first two steps had twice the rows
        ({"steps": None, "tokens": 500}, (2, 256, 256), 4, 512),
        ({"steps": None, "tokens": 500}, (1, 256, 256), 3, 512),
        ({"steps": None, "tokens": 500}, (9, 600, 600), 9, 600),
    ],
)
def test_where_a_run_ends_whose_batch_has_changed(train, done, steps, tokens):
    """Steps of 4 rows of 32 tokens; the schedule ends with the tokens that will have been seen."""
    exp = tiny.experiment(Path(), model={**tiny.MODEL, **ONE_LAYER}, mesh={"replica": 1}, train=train)
    parts = assemble(exp, build_mesh(exp.mesh, jax.devices()[:1])).going_on(*done)
    assert (parts.steps, parts.total_tokens) == (steps, tokens)
