import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from k3train.config.errors import UserError
from k3train.data import writer
from k3train.data.header import ORIGIN_NAMES, ORIGINS
from k3train.data.prepare import ensure_store, ensure_stores, prepare
from k3train.data.store import open_store
from k3train.data.tokenizer import ByteTokenizer

from .conftest import quiet


def documents(split) -> list[bytes]:
    """Texts of a split in its order, without BOS and EOS, which are checked."""
    found = []
    for i in range(split.documents):
        ids = split.document(i).tolist()
        assert (ids[0], ids[-1]) == (257, 258)
        found.append(bytes(ids[1:-1]))
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_every_document_is_there_once(store, texts):
    found = Counter(documents(store.train) + documents(store.holdout))
    assert found == Counter(text.encode() for text in texts)
    header = store.header
    assert header.train.documents + header.holdout_split.documents == len(texts)
    assert header.train.source_bytes + header.holdout_split.source_bytes == sum(len(text.encode()) for text in texts)
    assert header.train.tokens == header.train.source_bytes + 2 * header.train.documents
    assert (header.train.max_id, header.dtype) == (258, "<u2")
    store.verify()


def test_documents_are_shuffled(store, texts):
    encoded = [text.encode() for text in texts]
    places = [encoded.index(text) for text in documents(store.train)]
    assert places != sorted(places)


def test_store_does_not_depend_on_files_or_their_order(store, texts, tmp_path, make_config):
    lines = tmp_path / "all.jsonl"
    lines.write_text("\n".join(json.dumps({"text": text}) for text in reversed(texts)), encoding="utf-8")
    other = prepare(make_config([lines], holdout=0.2), say=quiet, shard_tokens=997)
    read, other_read = (
        [file for file in s.header.files if not file.name.endswith((ORIGINS, ORIGIN_NAMES))] for s in (store, other)
    )
    assert len(read) == len(store.header.files) - 4 and other_read == read
    assert other.fingerprint == store.fingerprint


def test_seed_changes_the_order_but_not_the_sides(store, text_files, make_config):
    other = prepare(make_config(text_files, holdout=0.2, shuffle_seed=1), say=quiet)
    assert documents(other.train) != documents(store.train)
    assert sorted(documents(other.train)) == sorted(documents(store.train))
    assert sorted(documents(other.holdout)) == sorted(documents(store.holdout))


def test_holdout_grows_with_its_share(store, text_files, make_config):
    more = prepare(make_config(text_files, holdout=0.5), say=quiet)
    assert set(documents(store.holdout)) < set(documents(more.holdout))
    assert 0.3 < more.holdout.documents / len(text_files) < 0.7
    text = documents(store.holdout)[0]
    assert int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64 < 0.2


def test_policy_without_specials(text_files, make_config):
    store = prepare(make_config(text_files, add_bos=False, add_eos=False), say=quiet)
    assert store.header.train.tokens == store.header.train.source_bytes
    assert store.max_id < 256


def test_bos_that_the_tokenizer_lacks(text_files, make_config, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "u": 1}, unk_token="u")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = {"kind": "huggingface", "path": str(tmp_path / "tokenizer.json")}
    with pytest.raises(UserError, match=r"data\.add_bos: the tokenizer .* names no BOS token"):
        prepare(make_config(text_files, tokenizer=tokenizer), say=quiet)
    store = prepare(make_config(text_files, tokenizer=tokenizer, add_bos=False, add_eos=False), say=quiet)
    assert store.header.tokenizer.bos_id is None
    assert store.pad_id == 0


def test_large_vocabulary_takes_four_bytes(text_files, make_config, monkeypatch):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

        def encode(self, text):
            return super().encode(text) + 69_000

    monkeypatch.setattr("k3train.data.prepare.load_tokenizer", lambda _: Wide())
    store = prepare(make_config(text_files), say=quiet)
    assert store.header.dtype == "<u4"
    assert store.max_id > 69_000


def test_a_second_prepare_opens_what_is_there(text_files, make_config):
    config = make_config(text_files)
    first = prepare(config, say=quiet)
    before = (first.path / "header.json").stat().st_mtime_ns
    assert prepare(config, say=quiet).fingerprint == first.fingerprint
    assert (first.path / "header.json").stat().st_mtime_ns == before
    prepare(config, replace=True, say=quiet)
    assert (first.path / "header.json").stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"holdout": 0.5}, "data.holdout: the store has 0.0, the config says 0.5"),
        ({"add_eos": False}, "data.add_eos: the store has True"),
        ({"shuffle_seed": 3}, "data.shuffle_seed: the store has 0"),
        ({"source": {"files": ["other.txt"]}}, "data.source.files: the store has"),
        ({"source": {"corpus": "django-5.2.8"}}, "data.source.corpus: the store has None"),
    ],
)
def test_a_store_made_otherwise(text_files, make_config, change, says):
    prepare(make_config(text_files), say=quiet)
    with pytest.raises(UserError, match=says) as error:
        ensure_store(make_config(text_files, **change))
    assert "--replace" in str(error.value)


def test_changed_source_files(tmp_path, make_config):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"text {name}")
    config = make_config(source={"files": [f"{folder}/*.txt"]})
    ensure_store(config, say=quiet)
    os.utime(folder / "a.txt", (1, 1))
    ensure_store(config)  # the same contents at another time
    (folder / "a.txt").write_text("text c")
    (folder / "c.txt").write_text("new")
    (folder / "b.txt").unlink()
    with pytest.raises(UserError) as error:
        ensure_store(config)
    for says in ("a.txt: changed", "b.txt: gone", "c.txt: new"):
        assert says in str(error.value)
    for file in folder.iterdir():
        file.unlink()
    ensure_store(config)  # carried to a machine without the sources


def test_ensure_refuses_a_small_vocabulary(text_files, make_config):
    with pytest.raises(UserError, match=r"token id 258, but model.vocab_size is 256"):
        ensure_stores(make_config(text_files), vocab_size=256, say=quiet)


def test_only_the_leader_prepares_and_all_reach_the_barrier(text_files, make_config):
    config, barrier, opened = make_config(text_files), threading.Barrier(3, timeout=60), []

    def process(index: int) -> None:
        opened.append(ensure_stores(config, is_leader=index == 0, barrier=barrier.wait, say=quiet).fingerprint)

    threads = [threading.Thread(target=process, args=(i,)) for i in (1, 2, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 3 and len(set(opened)) == 1


def test_a_failing_leader_lets_the_others_go(make_config, tmp_path):
    config, calls = make_config([tmp_path / "none.txt"]), []
    with pytest.raises(UserError, match="no file matches"):
        ensure_stores(config, barrier=lambda: calls.append("leader"))
    with pytest.raises(UserError, match="no token store here"):
        ensure_stores(config, is_leader=False, barrier=lambda: calls.append("other"))
    assert calls == ["leader", "other"]


def test_disk_full_leaves_the_old_store(text_files, make_config, monkeypatch, tmp_path):
    config = make_config(text_files)
    store = prepare(config, say=quiet)
    before = contents(store.path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(UserError, match=r"no space left on the disk .* the store is as it was"):
        prepare(config, replace=True, say=quiet)
    assert contents(store.path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", ".store.work", "store"]
    monkeypatch.undo()
    said = []
    prepare(config, replace=True, say=said.append)
    assert said == ["1 of 1 pieces were tokenized before; going on from there"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store"]


def test_a_foreign_folder_is_left_alone(text_files, make_config, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("mine")
    for replace in (False, True):
        with pytest.raises(UserError, match="no token store lies there; it is left alone"):
            prepare(make_config(text_files), replace=replace, say=quiet)
    assert (tmp_path / "store" / "thesis.tex").read_text() == "mine"


KILLED = """
import sys, time
from k3train.data import writer
from k3train.data.config import DataConfig
from k3train.data.prepare import prepare

where, store, files = sys.argv[1], sys.argv[2], sys.argv[3]
values = {"store": store, "sequence_length": 32, "holdout": 0.2, "source": {"files": [files]}}
config = DataConfig.model_validate(values)
def stop(*_):
    print("here", flush=True)
    time.sleep(600)
if where == "reading":
    prepare(config, replace=True, progress=lambda p: p.documents == 30 and stop(), say=lambda _: None)
elif where == "writing":
    write = writer.write_file
    def slow(path, parts):
        entry = write(path, parts)
        if "doc_offsets" in path.name:
            stop()
        return entry
    writer.write_file = slow
    prepare(config, replace=True, say=lambda _: None)
else:
    import pathlib
    rename = pathlib.Path.rename
    def between(self, target):
        result = rename(self, target)
        if str(target).endswith(".old"):
            stop()
        return result
    pathlib.Path.rename = between
    prepare(config, replace=True, say=lambda _: None)
"""


@pytest.mark.parametrize(
    ("where", "old"),
    [
        ("reading", False),
        ("writing", False),
        ("reading", True),
        ("writing", True),
        ("between the renames", True),  # without an old store there is one rename
    ],
)
def test_kill_9_leaves_nothing_half_written(where, old, text_files, make_config, tmp_path, store):
    pattern = str(text_files[0].parent / "*.txt")
    config = make_config(source={"files": [pattern]}, holdout=0.2)
    folder = Path(config.store)
    before = {}
    if old:
        prepare(config, say=quiet)
        before = contents(folder)
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, where, config.store, pattern], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
    if where != "between the renames":
        assert folder.exists() == old
        assert not old or contents(folder) == before
    again = prepare(config, say=quiet)
    assert again.train.tokens == store.train.tokens
    again.verify()
    assert not old or contents(folder) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store"]


def test_two_prepares_at_once_make_one(text_files, make_config):
    config, said = make_config(text_files), []
    threads = [threading.Thread(target=prepare, args=(config,), kwargs={"say": said.append}) for _ in range(2)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 60
    open_store(config.store).verify()


def test_replace_behind_a_link(text_files, make_config, tmp_path):
    """The folder that the link leads to is replaced, and the link stays."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk" / "tokens")  # as yet to nothing
    first = prepare(make_config(text_files), say=quiet)
    for _ in range(2):
        again = prepare(make_config(text_files, shuffle_seed=1), replace=True, say=quiet)
        assert (tmp_path / "store").is_symlink() and again.fingerprint != first.fingerprint
        assert ensure_store(make_config(text_files, shuffle_seed=1), say=quiet).fingerprint == again.fingerprint
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "store"]
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == [".tokens.lock", "tokens"]
