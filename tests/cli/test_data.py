import json
import subprocess
import sys

import pytest

from k3train.cli.main import main
from k3train.data.corpora import CORPORA
from k3train.data.prepare import Progress as Reading
from k3train.data.progress import ReadingBar


@pytest.fixture
def experiment(root, tmp_path):
    """A tiny experiment over 40 small documents."""
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"document {i} of a [bold]small[/bold] corpus\n" * (1 + i % 5))
    file = tmp_path / "experiment.yaml"
    file.write_text(
        f"""
extends: {root}/configs/model/k3_tiny.yaml
run: {{dir: {tmp_path}/run}}
data:
  store: {tmp_path}/store
  sequence_length: 64
  holdout: 0.2
  source: {{files: ['{tmp_path}/*.txt']}}
train: {{global_batch: 4, steps: 2}}
"""
    )
    return str(file)


@pytest.fixture
def prepared(experiment, capsys):
    assert main(["data", "prepare", experiment]) == 0
    capsys.readouterr()
    return experiment


def test_prepare_reports_exactly(experiment, tmp_path, capsys):
    assert main(["data", "prepare", experiment]) == 0
    out = capsys.readouterr().out
    size = sum(len(file.read_bytes()) for file in tmp_path.glob("*.txt"))
    rows = {line.split()[0]: line.replace(",", "").split() for line in out.splitlines() if line.split()}
    train, holdout = rows["train"], rows["holdout"]
    assert int(train[1]) + int(holdout[1]) == 40
    assert int(train[3]) + int(holdout[3]) == size
    assert int(train[2]) + int(holdout[2]) == size + 80
    assert "skipped nothing" in out and "licence: not stated" in out
    assert "reading" not in out


def test_the_bar_shows_only_where_something_is_read(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    with ReadingBar():
        pass
    assert not capsys.readouterr().err
    with ReadingBar() as bar:
        bar.update(Reading(3, 6, 1))
    assert "reading" in capsys.readouterr().err


def test_prepare_again_other_policy_and_replace(prepared, capsys):
    assert main(["data", "prepare", prepared]) == 0
    assert main(["data", "prepare", prepared, "data.holdout=0.5"]) == 30
    error = capsys.readouterr().err
    assert "data.holdout: the store has 0.2, the config says 0.5" in error and "Traceback" not in error
    assert main(["data", "prepare", "--replace", prepared, "data.holdout=0.5"]) == 0


def test_bad_input_is_one_line_and_exit_30(experiment, tmp_path, capsys):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    assert main(["data", "prepare", experiment]) == 30
    error = capsys.readouterr().err
    assert "bad.txt: line 1, byte 3: invalid UTF-8" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "store").exists()
    assert main(["data", "prepare", experiment, "data.source.on_bad_record=skip", "data.source.max_bad_share=1"]) == 0
    assert "skipped 1 records (1 invalid UTF-8)" in capsys.readouterr().out


def test_inspect_shows_rows(prepared, tmp_path, capsys):
    assert main(["data", "inspect", prepared, "--rows", "3", "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.count("epoch 0, row") == 3
    for part in ("every checksum agrees", "next document", "‹bos›", "‹eos›", "[bold]", "targets"):
        assert part in out


def test_inspect_shows_the_rows_of_a_step(prepared, tmp_path, capsys):
    """Steps of 4 whole rows; with a curriculum, of 2 rows of 32 tokens until 100 tokens are trained on."""
    assert main(["data", "inspect", prepared, "--rows", "4", "--sample", "4"]) == 0
    whole = capsys.readouterr().out
    assert main(["data", "inspect", prepared, "--rows", "99", "--step", "2"]) == 0
    assert capsys.readouterr().out == whole
    stages = "train.curriculum=[{tokens: 0, sequence_length: 32, global_batch: 2}, {tokens: 100}]"
    shown = {}
    for step in ("1", "2", "3"):
        assert main(["data", "inspect", prepared, stages, "kernels.kda_chunk=32", "--rows", "9", "--step", step]) == 0
        shown[step] = capsys.readouterr().out
    assert "from token 0 on)" in shown["1"] and "from token 32 on)" in shown["1"] and "sample 0 (" in shown["1"]
    assert "sample 1 (" in shown["2"] and "sample 0 (" not in shown["2"]
    assert [f"sample {k} (" in shown["3"] for k in range(1, 7)] == [False, True, True, True, True, False]
    assert "from token 0 on" not in shown["3"] and "microbatches" in shown["3"]
    for wrong in (["--sample", "3"], ["--holdout"], ["--sequence-length", "8"]):
        assert main(["data", "inspect", prepared, "--step", "1", *wrong]) == 2
    assert main(["data", "inspect", str(tmp_path / "store"), "--step", "1"]) == 2
    assert main(["data", "inspect", prepared, "--step", str(2**61)]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_inspect_a_folder_and_its_held_out_padding(prepared, tmp_path, capsys):
    folder = str(tmp_path / "store")
    assert main(["data", "inspect", folder, "--holdout", "--rows", "1", "--sequence-length", "100000"]) == 0
    assert "‹padding x " in capsys.readouterr().out
    assert main(["data", "inspect", folder, "data.holdout=1"]) == 30
    for option in (["--rows", "-1"], ["--sample", "99999999999999999999"], ["--sequence-length", "0"]):
        assert main(["data", "inspect", folder, *option]) == 2


def test_stats_of_an_experiment_and_of_a_folder(prepared, tmp_path, capsys):
    assert main(["data", "stats", prepared]) == 0
    out = capsys.readouterr().out
    for part in ("rows of 64 tokens", "best_fit", "◄ a row", "longest documents, holdout", ".txt:1"):
        assert part in out
    assert main(["data", "stats", str(tmp_path / "store"), "--json", "--longest", "1"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert stats["sequence_length"] == 512 and len(stats["train"]["longest"]) == 1
    assert stats["train"]["documents"] + stats["holdout"]["documents"] == 40
    for option in (["--longest", "-1"], ["--sequence-length", "0"]):
        assert main(["data", "stats", prepared, *option]) == 2


def test_inspect_without_a_store(experiment, capsys):
    assert main(["data", "inspect", experiment]) == 30
    assert "no token store here" in capsys.readouterr().err


def test_ngram_prepares_and_scores(experiment, capsys):
    assert main(["data", "ngram", experiment, "--order", "2"]) == 0
    out = capsys.readouterr().out
    assert "order-2 byte n-gram" in out
    assert 0 < float(out.split("Kneser-Ney): ")[1].split()[0]) < 8


def test_corpora_are_listed(capsys):
    assert main(["data", "corpora"]) == 0
    out = capsys.readouterr().out
    for name in CORPORA:
        assert name in out
    assert "BSD-3-Clause" in out


def test_no_action_is_a_usage_error(capsys):
    assert main(["data"]) == 2


def test_help_and_the_data_room_import_no_jax():
    code = (
        "import sys; from k3train.cli.main import main; main(['data', 'corpora']); "
        "import k3train.data.prepare, k3train.data.ngram, k3train.data.holdout, k3train.data.report; "
        "sys.exit('jax' in sys.modules or 'grain' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
