"""The command line: exit codes, lazy imports, the config command."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3train import __version__
from k3train.cli import main as cli
from k3train.cli import test as cli_test
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

EXPERIMENT = """\
extends: {model}
run: {{dir: runs/x}}
data: {{store: data/x, sequence_length: 256}}
train:
  global_batch: 8
  tokens: 256Ki
"""


@pytest.fixture
def experiment(root, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(EXPERIMENT.format(model=root / "configs/model/k3_tiny.yaml"))
    return str(path)


@pytest.fixture
def command(monkeypatch):
    """Puts a stand-in where the config command's module would be."""

    def use(run, add_arguments=lambda parser: None):
        module = SimpleNamespace(add_arguments=add_arguments, run=run)
        monkeypatch.setattr(cli, "_module", lambda name: module)

    return use


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"k3train {__version__}\n"
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_overrides_may_stand_on_either_side_of_options(command):
    seen = []

    def run(args):
        seen.append((args.run, args.step, args.overrides))
        return 0

    def add_arguments(parser):
        parser.add_argument("run")
        parser.add_argument("overrides", nargs="*", default=[])
        parser.add_argument("--step", type=int)

    command(run, add_arguments)
    for words in (["RUN", "a.b=1", "--step", "3", "c=2"], ["--step", "3", "RUN", "a.b=1", "c=2"]):
        assert cli.main(["config", *words]) == 0 and seen.pop() == ("RUN", 3, ["a.b=1", "c=2"])
    for words in (["RUN", "--step", "3", "word"], ["RUN", "--stop=3"], ["RUN", "--stop", "a=3"]):
        assert cli.main(["config", *words]) == ExitCode.USAGE and not seen


@pytest.mark.parametrize(("argv", "message"), [
    ([], "usage"), (["trian"], "did you mean train?"), (["xyzzy"], "there are train, evaluate"), (["--what"], "usage"),
    (["config"], "ACTION"), (["config", "show"], "file"),
])  # fmt: skip
def test_usage_errors_exit_2(capsys, argv, message):
    assert cli.main(argv) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_exit_codes_of_commands(command, capsys):
    def user_error(args):
        raise UserError("the folder is locked", ExitCode.RUN_FOLDER)

    def bug(args):
        raise ZeroDivisionError("seven")

    def interrupt(args):
        raise KeyboardInterrupt

    for run, code, err in (
        (lambda args: 13, 13, ""),
        (user_error, 33, "k3train: error: the folder is locked\n"),
        (interrupt, 130, "k3train: interrupted\n"),
    ):
        command(run)
        assert cli.main(["train"]) == code
        assert capsys.readouterr().err == err
    command(bug)
    assert cli.main(["train"]) == ExitCode.BUG
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: seven" in err


def test_config_show_tells_where_values_come_from(experiment, capsys):
    assert cli.main(["config", "show", experiment, "optim.muon.lr=0.02"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "\033" not in "".join(out)
    assert any(line.split() == ["lr:", "0.02", "#", "command", "line"] for line in out)
    assert any(line.split() == ["tokens:", "262144", "#", f"{experiment}:6"] for line in out)
    assert any(line.split() == ["momentum:", "0.95", "#", "default"] for line in out)


def test_config_validate(experiment, capsys):
    assert cli.main(["config", "validate", experiment]) == 0
    assert cli.main(["config", "validate", experiment, "train.stepz=3"]) == ExitCode.CONFIG
    err = capsys.readouterr().err
    assert "command line: train.stepz: unknown key; did you mean train.steps?" in err
    assert "Traceback" not in err
    assert cli.main(["config", "validate", experiment, "train.steps"]) == ExitCode.USAGE


def test_validation_imports_no_jax(experiment):
    code = f"""
import sys
from k3train.cli.main import main
assert main(["config", "validate", {experiment!r}]) == 0
heavy = {{"jax", "flax", "optax", "orbax", "grain", "numpy"}} & set(sys.modules)
assert not heavy, heavy
"""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    print(f"validation took {time.perf_counter() - start:.2f} s")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_imports_no_jax(name):
    code = f"""
import sys
from k3train.cli.main import main
assert main([{name!r}, "--help"]) == 0
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_reader_that_leaves_is_no_error(experiment):
    process = subprocess.Popen(
        [sys.executable, "-m", "k3train", "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


def test_test_command_runs_every_step_and_tells_what_failed(monkeypatch, capfd):
    good, bad = [sys.executable, "-c", "print('fine')"], [sys.executable, "-c", "raise SystemExit(5)"]
    monkeypatch.setattr(cli_test, "steps", lambda args: {"one": bad, "two": good, "three": [*good, *args]})
    assert cli.main(["test", "--", "-k", "x"]) == ExitCode.BUG
    out = capfd.readouterr().out
    assert out.count("fine") == 2
    assert out.endswith("== failed: one\n")
    monkeypatch.setattr(cli_test, "steps", lambda args: {"two": good})
    assert cli.main(["test"]) == ExitCode.FINISHED


def test_test_command_passes_arguments_to_pytest():
    assert cli_test.steps(["-k", "x"])["pytest"][1:] == ["-m", "pytest", "-n", "2", "--dist", "worksteal", "-k", "x"]


def test_test_command_keeps_bytecode(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    code = "import k3train.config.errors as e, pathlib; assert pathlib.Path(e.__cached__).exists()"
    subprocess.run([sys.executable, "-c", code], env=cli_test.environment(str(tmp_path)), check=True)
    assert any(tmp_path.rglob("*.pyc"))


def test_compilers_of_other_devices_are_installed_once(monkeypatch, tmp_path):
    calls: list[list[str]] = []

    def pip(command, **_):
        calls.append(command)
        folder = Path(command[command.index("--target") + 1])
        folder.mkdir()
        (folder / "libtpu").mkdir()
        return subprocess.CompletedProcess(command, len(calls) == 1)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli_test.subprocess, "run", pip)
    with pytest.raises(UserError, match=r"targets.txt: the installation failed") as error:
        cli_test.install_targets()
    assert error.value.exit_code is ExitCode.SETUP and not list((tmp_path / "k3train/targets").iterdir())
    folder = cli_test.install_targets()
    assert (folder / "libtpu").is_dir() and cli_test.install_targets() == folder and len(calls) == 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_interrupt_that_a_library_drops_is_one(command, capsys, monkeypatch):
    """jaxlib, interrupted while it is imported, raises ImportError and nothing else."""
    monkeypatch.setattr(cli, "_heard", [])

    def run(args):
        with pytest.raises(KeyboardInterrupt):
            cli._interrupt(2, None)
        raise ImportError("while initializing the extension")

    command(run)
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "k3train: interrupted\n"
