"""Workers, pieces, and what a prepare that was killed leaves: the same store as an undisturbed run in one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.data import workers
from k3train.data.piecework import Work, finished
from k3train.data.prepare import prepare
from k3train.data.workers import Workers

from .conftest import quiet
from .formats import jsonl

PIECE = 4000


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts) -> Path:
    """600 documents in one JSONL file, with a text thrice, and some .txt files."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = [{"text": f"{i % 500} {texts[i % len(texts)]}"} for i in range(600)]
    (folder / "a.jsonl").write_bytes(jsonl(rows))
    for i, text in enumerate(texts[:20]):
        (folder / f"b{i:02d}.txt").write_text(text, encoding="utf-8")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, corpus) -> dict[str, bytes]:
    """The store that one process makes in one piece."""
    from k3train.data.config import DataConfig

    values = {"store": str(tmp_path_factory.mktemp("alone") / "store"), "sequence_length": 32, "holdout": 0.1}
    source = {"files": [f"{corpus}/*"], "workers": 1}
    return files_of(prepare(DataConfig.model_validate(values | {"source": source}), say=quiet, shard_tokens=9973).path)


def config_of(make_config, corpus, workers=2, **source):
    return make_config(source={"files": [f"{corpus}/*"], "workers": workers} | source, holdout=0.1)


def test_pieces_and_workers_change_no_byte(make_config, corpus, alone, tmp_path):
    seen = []
    config = config_of(make_config, corpus)
    store = prepare(config, say=quiet, shard_tokens=9973, piece_bytes=PIECE, progress=seen.append)
    assert files_of(store.path) == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store"]
    assert len(seen) > 20 and seen[-1].bytes_done == seen[-1].bytes_total and seen[-1].documents == 620
    assert [s.bytes_done for s in seen] == sorted(s.bytes_done for s in seen)


KILLED = """
import os, sys
from k3train.data import piecework, writer
from k3train.data.config import DataConfig
from k3train.data.prepare import prepare

where, after = sys.argv[2], int(sys.argv[3])
count = 0
def here(*_):
    global count
    count += 1
    if count == after:
        print("here", flush=True)
        os.kill(os.getpid(), 9)
if where == "piece done":
    put = piecework._put
    piecework._put = lambda *a: (put(*a), here())
elif where == "piece not yet done":
    put = piecework._put
    piecework._put = lambda *a: (here(), put(*a))
elif where == "within a piece":
    piecework.Side.add = (lambda add: lambda self, *a: (here(), add(self, *a)))(piecework.Side.add)
else:
    writer.write_file = (lambda write: lambda *a: (here(), write(*a))[1])(writer.write_file)
config = DataConfig.model_validate_json(sys.argv[1])
prepare(config, say=lambda _: None, shard_tokens=9973, piece_bytes=4000)
"""


@pytest.mark.parametrize(
    ("where", "after", "kept"),
    [("within a piece", 300, True), ("piece not yet done", 1, False), ("piece done", 9, True), ("shards", 3, True)],
)
def test_kill_9_and_again_is_the_same_store(make_config, corpus, alone, tmp_path, where, after, kept):
    config = config_of(make_config, corpus, workers=1)
    arguments = [sys.executable, "-c", KILLED, config.model_dump_json(), where, str(after)]
    assert subprocess.run(arguments, capture_output=True, timeout=600).returncode == -signal.SIGKILL
    assert not (tmp_path / "store").exists()
    said = []
    store = prepare(config, say=said.append, shard_tokens=9973, piece_bytes=PIECE)
    assert any("were tokenized before" in line for line in said) == kept
    made = files_of(store.path)
    assert made == alone | {"header.json": made["header.json"]}
    assert json.loads(made["header.json"]) == json.loads(alone["header.json"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store"]


def test_kill_9_of_the_parent_ends_its_workers(make_config, corpus, alone):
    """At a moment that nobody chose."""
    code = KILLED.replace("where, after = sys.argv[2], int(sys.argv[3])", 'where, after = "shards", 1')
    code = code.replace("here())", "None)").replace("(here(), write(*a))[1]", "write(*a)")
    config = config_of(make_config, corpus)
    child = subprocess.Popen([sys.executable, "-c", code, config.model_dump_json()])
    ended = time.monotonic() + 300
    while len(workers := [int(pid) for pid in children(child.pid)]) < 2 and time.monotonic() < ended:
        time.sleep(0.01)
    time.sleep(0.5)
    child.kill()
    child.wait()
    assert len(workers) == 2
    while any(Path(f"/proc/{pid}").exists() and not is_dead(pid) for pid in workers) and time.monotonic() < ended:
        time.sleep(0.01)
    assert all(is_dead(pid) for pid in workers)
    store = prepare(config, say=quiet, shard_tokens=9973, piece_bytes=PIECE)
    assert files_of(store.path) == alone


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_torn_piece_is_made_again(make_config, corpus, alone, monkeypatch, tmp_path):
    """A piece whose file was cut off after it was finished, as a disk may do that loses power."""
    config = config_of(make_config, corpus, workers=1)

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("k3train.data.build._Builder.write", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, say=quiet, shard_tokens=9973, piece_bytes=PIECE)
    pieces = [piece for piece in (tmp_path / ".store.work").iterdir() if piece.is_dir()]
    assert len(pieces) > 10 and all(finished(piece) for piece in pieces)
    with (pieces[0] / "train.tokens").open("r+b") as file:
        file.truncate(10)
    said = []
    store = prepare(config, say=said.append, shard_tokens=9973, piece_bytes=PIECE)
    assert said == [f"{len(pieces) - 1} of {len(pieces)} pieces were tokenized before; going on from there"]
    assert files_of(store.path) == alone


def test_only_what_changed_is_read_again(make_config, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.jsonl").write_bytes(jsonl([{"text": f"{name}{i}"} for i in range(300)]))
    (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes() + b"no json\n")
    config = make_config(source={"files": [f"{folder}/*"], "workers": 1})
    with pytest.raises(UserError, match=r"b.jsonl: line 301, byte \d+: broken JSON"):
        prepare(config, say=quiet, piece_bytes=2000)
    (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes().replace(b"no json\n", b""))
    said = []
    assert prepare(config, say=said.append, piece_bytes=2000).train.documents == 900
    assert "pieces were tokenized before" in said[0]
    assert list(Path(config.store).parent.glob(".store.w*")) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_bad_record_of_all_is_named(make_config, tmp_path, workers):
    rows = [{"text": f"document {i}"} for i in range(1000)]
    lines = jsonl(rows).splitlines(keepends=True)
    for number in (400, 401, 900):
        lines[number] = b"no json\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    config = make_config(source={"files": [str(tmp_path / "a.jsonl")], "workers": workers})
    with pytest.raises(UserError, match=f"a.jsonl: line 401, byte {sum(map(len, lines[:400]))}: broken JSON"):
        prepare(config, say=quiet, piece_bytes=1500)


@pytest.mark.parametrize("workers", [1, 2])
def test_skips_have_lines_of_the_file(make_config, tmp_path, workers):
    lines = jsonl([{"text": f"document {i}"} for i in range(1000)]).splitlines(keepends=True)
    for number in (3, 400, 900):
        lines[number] = b"\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    config = make_config(
        source={
            "files": [str(tmp_path / "a.jsonl")],
            "workers": workers,
            "on_bad_record": "skip",
            "max_bad_share": 0.003,
        }
    )
    store = prepare(config, say=quiet, piece_bytes=1500)
    skips = [json.loads(line) for line in (store.path / "skips.jsonl").read_text().splitlines()]
    assert [(skip["line"], skip["offset"]) for skip in skips] == [
        (number + 1, sum(map(len, lines[:number]))) for number in (3, 400, 900)
    ]
    for i in (0, 500, 996):
        origin = store.train.origin(i)
        assert origin is not None
        line = lines[origin.line - 1]
        assert b"".join(lines)[origin.offset : origin.offset + len(line)] == line
        assert json.loads(line)["text"].encode() == bytes(store.train.document(i)[1:-1].tolist())


def test_errors_of_workers_are_the_errors_of_one_process(make_config, tmp_path, corpus, monkeypatch):
    """A worker that is killed; a fault of ours; a full disk."""
    config = config_of(make_config, corpus)
    work = Work(config, [], tmp_path, "<u2", "", "")
    says = r"failed:\nTraceback(.|\n)*KeyError: 'do'"
    with Workers(2, work.dump(), lambda _: None) as started, pytest.raises(RuntimeError, match=says):
        list(started.map([{}]))
    dedup = ("data dedup", "Nothing was written: run it again")
    for of, says in (
        ((), r"data prepare was .*run it again and it goes on there"),
        (dedup, "data dedup was .*Nothing"),
    ):
        with Workers(2, work.dump(), lambda _: None, *of) as started:
            for process in started._processes:
                process.kill()
            with pytest.raises(UserError, match=says.replace("was", "was killed by signal 9")):
                list(started.map([{}, {}]))
    torn = ["sh", "-c", "read job; printf '{\"resul'; kill -9 $$"]  # killed in the middle of an answer
    with subprocess.Popen(torn, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert workers._ask(process, {}) == {"failure": {"kind": "died", "status": -9}}
    with Workers(2, work.dump(), lambda _: None) as started:
        job = {"do": "shard", "folders": [], "plan": "none.npy", "out": str(tmp_path)}
        with pytest.raises(FileNotFoundError):
            list(started.map([job]))
    assert not [pid for pid in children(os.getpid()) if not is_dead(int(pid)) and is_worker(pid)]


def is_worker(pid: str) -> bool:
    return b"k3train.data.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_kill_9_again_and_again_at_moments_that_nobody_chose(make_config, corpus, alone, tmp_path):
    """The parent of two workers is killed ever later, each time going on where the last was."""
    code = KILLED.replace("where, after = sys.argv[2], int(sys.argv[3])", 'where, after = "none", 0')
    code = code.replace("here())", "None)").replace("(here(), write(*a))[1]", "write(*a)")
    config = config_of(make_config, corpus)
    random, killed = np.random.default_rng(), 0
    for least in (0.2, 0.4, 0.6, 0.8):
        child = subprocess.Popen([sys.executable, "-c", code, config.model_dump_json()])
        time.sleep(least + random.uniform(0, 0.3))
        child.kill()
        killed += child.wait() == -signal.SIGKILL
        assert not Path(config.store).exists() or files_of(Path(config.store)) == alone
    assert killed
    store = prepare(config, say=quiet, shard_tokens=9973, piece_bytes=PIECE)
    assert files_of(store.path) == alone
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store.lock", "store"]


def test_a_worker_that_dies_at_work_ends_the_prepare_at_once(make_config, corpus, tmp_path, monkeypatch):
    config = config_of(make_config, corpus)
    alive: list[int] = []
    start = workers._start

    def watched(setup):
        process = start(setup)
        alive.append(process.pid)
        return process

    def kill_one(progress):
        if progress.documents > 100 and len(alive) == 2:
            os.kill(alive.pop(), signal.SIGKILL)

    monkeypatch.setattr(workers, "_start", watched)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"a worker of data prepare was killed by signal 9 .*run it again and it goes"):
        prepare(config, say=quiet, piece_bytes=PIECE, progress=kill_one)
    assert time.monotonic() - began < 60
    assert not Path(config.store).exists()
    assert not [pid for pid in children(os.getpid()) if not is_dead(int(pid)) and is_worker(pid)]
    said = []
    assert prepare(config, say=said.append, piece_bytes=PIECE).train.documents
    assert "pieces were tokenized before" in said[0]
