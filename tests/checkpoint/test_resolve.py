"""Reading run.resume and run.init_from."""

import pytest
from etils.epath import Path

from k3train.checkpoint.layout import mark
from k3train.checkpoint.manifest import RETIRED, write_manifest
from k3train.checkpoint.resolve import Found, locate, resolve_resume
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode


@pytest.fixture
def run(tmp_path):
    """A run folder with complete steps 10 and 20, the latter twice, and a broken-off 30."""
    directory = tmp_path / "old" / "checkpoints"
    for name in ("10", "20", "20-2", "30"):
        (directory / name).mkdir(parents=True)
        if name != "30":
            write_manifest(Path(directory / name), {"step": int(name[:2]), "meta": {}})
    mark(Path(directory / "20"), RETIRED, "the run went on from step 10")
    return tmp_path / "old"


def test_auto_and_must(run, tmp_path):
    assert resolve_resume("auto", run) == Found(run / "checkpoints", 20)
    assert resolve_resume("must", run) == (run / "checkpoints", 20)
    assert resolve_resume("auto", tmp_path / "new") is None
    with pytest.raises(UserError, match="must, but there is no checkpoint") as caught:
        resolve_resume("must", tmp_path / "new")
    assert caught.value.exit_code == ExitCode.CHECKPOINT


def test_never(run, tmp_path):
    assert resolve_resume("never", tmp_path / "new") is None
    with pytest.raises(UserError, match=r"never.*steps 10, 20.*auto") as caught:
        resolve_resume("never", run)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER


@pytest.mark.parametrize("tail, step", [("@10", 10), ("@latest", 20), ("/checkpoints@10", 10)])
def test_path_at_step(run, tmp_path, tail, step):
    assert resolve_resume(f"{run}{tail}", tmp_path / "new") == (run / "checkpoints", step)


def test_an_at_sign_in_the_path(run):
    other = run.rename(run.parent / "a@b")
    assert resolve_resume(f"{other}@10", run).step == 10
    assert locate(str(other)).step == 20


@pytest.mark.parametrize(
    "tail, message",
    [
        ("@30", "no checkpoint of step 30; there: 10, 20"),
        ("@x", "'x' after the @"),
        ("", "none of auto"),
        ("x@1", "not a folder"),
    ],
)
def test_errors(run, tail, message):
    with pytest.raises(UserError, match=message) as caught:
        resolve_resume(f"{run}{tail}", run)
    assert caught.value.exit_code == ExitCode.CHECKPOINT


def test_locate_weights(run, tmp_path):
    for text, step in ((f"{run}", 20), (f"{run}/checkpoints", 20), (f"{run}/checkpoints/10", 10), (f"{run}@10", 10)):
        assert locate(text) == (run / "checkpoints", step)
    assert locate(f"{run}/checkpoints/20-2") == (run / "checkpoints", 20)
    with pytest.raises(UserError, match=r"checkpoints/20 is no checkpoint: retired: the run went on from step 10"):
        locate(f"{run}/checkpoints/20")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"run.init_from: .*empty holds no complete checkpoint"):
        locate(str(tmp_path / "empty"))


def test_a_folder_that_cannot_be_looked_into(run, as_nobody):
    (run / "checkpoints").chmod(0o700)
    for look in (lambda: locate(str(run)), lambda: resolve_resume("auto", run)):
        with as_nobody(), pytest.raises(UserError, match="cannot look for checkpoints: no permission") as caught:
            look()
        assert caught.value.exit_code == ExitCode.CHECKPOINT
