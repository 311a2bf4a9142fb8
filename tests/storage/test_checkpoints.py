"""Checkpoints in object stores: saved, restored, damaged, quarantined, torn, deleted, as on disk."""

import json

import jax
import pytest
from small_state import MARKERS, META, abstract_of, make_state, on_four, on_one, same

from k3train.checkpoint import orbax_store
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import CheckpointRefused, SaveFailed
from k3train.checkpoint.layout import scan
from k3train.checkpoint.manager import CheckpointManager
from k3train.checkpoint.resolve import locate, resolve_resume
from k3train.cli.main import main
from k3train.config.object_store import filesystem, get, objects_below, put


@pytest.fixture(params=["s3", "gcs"])
def store(request) -> str:
    """A run's address, in each kind of store."""
    return request.getfixturevalue(request.param)


def biggest(folder: str) -> str:
    """The address of the largest data object below."""
    stamps = {name: stamp for name, stamp in objects_below(folder).items() if name not in MARKERS}
    return f"{folder}/{max(stamps, key=lambda name: stamps[name].size)}"


def flip(path: str) -> None:
    """Change one bit in the middle of an object."""
    content = bytearray(get(path))
    content[len(content) // 2] ^= 4
    put(path, bytes(content))


def test_round_trip_damage_and_fallback(store):
    notes = []
    manager = CheckpointManager(f"{store}/checkpoints", CheckpointConfig(keep=9), note=notes.append)
    assert manager.steps() == [] and resolve_resume("auto", store) is None
    for step in (5, 10):
        manager.save(step, make_state(on_four(), seed=step), META, block=True)
    restored, meta = manager.restore(10, abstract_of(make_state(), on_one()))
    assert same(restored, make_state(seed=10)) and meta == META
    # A fresh look, as another process has it.
    manager = CheckpointManager(f"{store}/checkpoints", CheckpointConfig(keep=9), note=notes.append)
    assert manager.steps() == [5, 10] and manager.verify(10) == []
    assert locate(store).step == locate(f"{store}@latest").step == 10
    flip(biggest(f"{store}/checkpoints/10"))
    with pytest.raises(CheckpointRefused, match=r"damaged and was not loaded(.|\n)*step 5 is good"):
        CheckpointManager(f"{store}/checkpoints", CheckpointConfig()).restore(10, abstract_of(make_state()))
    assert CheckpointManager(f"{store}/checkpoints", CheckpointConfig(), note=notes.append).newest_good() == 5
    assert "SHA-256" in json.loads(get(f"{store}/checkpoints/10/quarantined.json"))["reason"]
    # Saved again beside the one that is kept for a look.
    manager.save(10, make_state(seed=11), META, block=True)
    assert get(f"{store}/checkpoints/10-2/manifest.json") and manager.steps() == [5, 10]
    assert same(manager.restore(10, abstract_of(make_state()))[0], make_state(seed=11))
    # Going back sets the later ones aside by a marker.
    manager.retire(5)
    assert manager.steps() == [5] and get(f"{store}/checkpoints/10-2/retired.json")


def test_a_torn_save_is_no_checkpoint_and_makes_way(s3):
    manager = CheckpointManager(f"{s3}/checkpoints", CheckpointConfig(keep=1), note=lambda text: None)
    manager.save(5, make_state(seed=5), META, block=True)
    manager.save(10, make_state(seed=10), META, block=True)
    assert manager.steps() == [10] and not objects_below(f"{s3}/checkpoints/5")  # keep=1 deleted it whole
    # What a process leaves that dies before the manifest, and one that dies while it deletes.
    filesystem(s3).rm_file(f"{s3}/checkpoints/10/manifest.json")
    put(f"{s3}/checkpoints/10.saving.json", b"{}")
    manager = CheckpointManager(f"{s3}/checkpoints", CheckpointConfig(), note=lambda text: None)
    assert manager.steps() == [] and [e.status for e in scan(manager.directory)] == ["unfinished"]
    with pytest.raises(CheckpointRefused):
        manager.restore(10, abstract_of(make_state()))
    manager.save(12, make_state(seed=12), META, block=True)
    assert manager.steps() == [12] and not objects_below(f"{s3}/checkpoints/10")
    missing = biggest(f"{s3}/checkpoints/12")
    filesystem(s3).rm_file(missing)
    assert manager.verify(12) == [f"{missing.removeprefix(f'{s3}/checkpoints/12/')} is missing"]


# Of the arrays' writes Orbax awaits the first that fails; what the others raise is found by the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_outage_is_a_failed_save(s3, s3_server, monkeypatch):
    """No server: the save fails within its time, is counted, and the next one succeeds."""
    monkeypatch.setattr(orbax_store, "RETRIES", {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"})
    notes = []
    manager = CheckpointManager(f"{s3}/checkpoints", CheckpointConfig(), note=notes.append)
    manager.save(5, make_state(seed=5), META, block=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # TensorStore's part of the save only
    with pytest.raises(SaveFailed):
        manager.save(10, make_state(seed=10), META, block=True)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    assert manager.failures == 1 and manager.newest_good() == 5
    manager.save(10, make_state(seed=10), META, block=True)
    assert manager.failures == 0 and manager.newest_good() == 10
    assert same(manager.restore(10, abstract_of(make_state()))[0], jax.tree.map(lambda x: x, make_state(seed=10)))


def test_the_ckpt_command(s3, capsys):
    """list, verify, prune, keep and diff at an address."""
    manager = CheckpointManager(f"{s3}/checkpoints", CheckpointConfig(keep=9))
    for step in (5, 10, 15):
        manager.save(step, make_state(seed=step), META | {"config": {"checkpoint": {"keep": 9}}}, block=True)
    assert main(["ckpt", "list", s3, "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [5, 10, 15]
    assert main(["ckpt", "verify", s3, "--all"]) == 0
    assert main(["ckpt", "diff", f"{s3}@5", f"{s3}@10", "--values"]) == 0
    assert main(["ckpt", "keep", s3, "5"]) == 0
    assert main(["ckpt", "prune", s3, "--keep", "1"]) == 0
    assert manager.steps() == [5, 15]
    flip(biggest(f"{s3}/checkpoints/15"))
    assert main(["ckpt", "verify", s3]) == 31
