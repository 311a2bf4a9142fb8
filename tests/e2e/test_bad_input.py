"""Bad input to whole commands: one clear message, the exit code of the table, and nothing lost or half-written."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from k3train.cli.main import main
from k3train.config.exit_codes import ExitCode
from k3train.data.prepare import prepare


def quiet(_: str) -> None:
    """Takes what a person would be told."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with text, an experiment file ``x.yaml`` and the store it names."""
    tiny.write_text(tmp_path)
    exp = tiny.experiment(tmp_path)
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    prepare(exp.data, say=quiet)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    """Name and hash of every file but locks, which are empty."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("lock"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def typo(project: Path) -> list[str]:
    return ["train.globl_batch=8"]


def a_broken_line(project: Path) -> list[str]:
    (project / "text" / "b.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    return [f"data.store={project / 'new'}", f"data.source.files=[{project}/text/*.jsonl]"]


def an_empty_file(project: Path) -> list[str]:
    (project / "empty.txt").write_text("")
    return [f"data.store={project / 'new'}", f"data.source.files=[{project}/empty.txt]"]


def a_changed_source(project: Path) -> list[str]:
    with (project / "text" / "a.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    return []


def a_flipped_bit(project: Path) -> list[str]:
    file = project / "store" / "train" / "tokens-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return []


def too_few_words(project: Path) -> list[str]:
    return ["model.vocab_size=200"]


def a_foreign_folder(project: Path) -> list[str]:
    (project / "run").mkdir()
    (project / "run" / "thesis.txt").write_text("the only copy")
    return []


def no_checkpoint(project: Path) -> list[str]:
    return ["run.resume=must"]


@pytest.mark.parametrize(
    ("damage", "code", "says"),
    [
        (typo, ExitCode.CONFIG, "did you mean train.global_batch?"),
        (a_broken_line, ExitCode.CONFIG, "b.jsonl: line 2, byte 25: broken JSON"),
        (an_empty_file, ExitCode.CONFIG, "empty.txt: line 1, byte 0: empty file"),
        (a_changed_source, ExitCode.CONFIG, "a.jsonl: changed since the store was made"),
        (a_flipped_bit, ExitCode.CONFIG, "tokens-00000.bin: contents differ from the header's checksum"),
        (too_few_words, ExitCode.CONFIG, "set model.vocab_size to 259 or more"),
        (a_foreign_folder, ExitCode.RUN_FOLDER, "is not empty and not a run folder (it holds thesis.txt)"),
        (no_checkpoint, ExitCode.CHECKPOINT, "run.resume is must, but there is no checkpoint"),
    ],
)
def test_train_refuses(project, capsys, damage, code, says):
    """No command, no data, no checkpoint of the user is touched; a run folder holds its own records at most."""
    overrides = damage(project)
    before = contents(project)
    assert main(["train", str(project / "x.yaml"), *overrides]) == code
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said and len(said.splitlines()) < 25
    after = contents(project)
    assert before.items() <= after.items()
    assert {name for name in after.keys() - before.keys() if not name.startswith("run/")} == set()


def test_no_space_for_the_run_folder(project):
    """A limit on the size of files stands for the full disk."""
    train = [sys.executable, "-m", "k3train", "train", str(project / "x.yaml")]
    command = ["sh", "-c", 'ulimit -f 200; exec "$@"', "sh", *train]  # blocks of 512 bytes
    before = contents(project)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.RUN_FOLDER, done.stderr[-2000:]
    assert f"{project / 'run'}: cannot write to the run folder" in done.stderr and "Traceback" not in done.stderr
    assert contents(project) == before


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_runs_that_are_none(project, capsys, command):
    rest = ["text"] if command == "generate" else []
    for run, says in ((project / "none", "is not a folder"), (project / "store", "holds no complete checkpoint")):
        assert main([command, str(run), *rest]) == ExitCode.CHECKPOINT
        assert says in capsys.readouterr().err


def test_prepare_skips_and_counts_by_policy(project, capsys):
    (project / "text" / "b.jsonl").write_bytes(
        b'{"text": "a"}\n{"text": "\xff"}\nno json\n{"text": " "}\n{"txt": "c"}\n'
    )
    options = ["data.source.on_bad_record=skip", "data.source.max_bad_share=1", f"data.store={project / 'new'}"]
    assert main(["data", "prepare", str(project / "x.yaml"), *options]) == 0
    assert "skipped 4 records" in capsys.readouterr().out
    lines = [json.loads(line) for line in (project / "new" / "skips.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [2, 3, 4, 5]
