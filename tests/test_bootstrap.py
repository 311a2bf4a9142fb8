"""The bootstrap script with stand-ins for Python, pip and uv: what it finds, installs, repairs and refuses."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Stands in for a Python: passes or fails the version check, makes venvs, and logs what pip is asked to install.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-c "*) exit ${FAKE_OLD:-0} ;;
"-m venv")
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv $0" >>"$FAKE_LOG" ;;
"-m pip")
    shift 2
    echo "pip $*" >>"$FAKE_LOG"
    sleep ${FAKE_SLEEP:-0}
    [ -z "$FAKE_FAIL" ] || { echo "ERROR: no such package" >&2; echo "a hint" >&2; exit 1; }
    printf '#!/bin/sh\\necho "ran in $PWD: $*"\\n' >"${0%/*}/k3train"
    chmod +x "${0%/*}/k3train" ;;
esac
"""
SHIM = "#!/bin/sh\nexit 127\n"
TOOLS = ("sh", "dirname", "cat", "cksum", "grep", "tail", "rm", "mkdir", "cp", "chmod", "sleep", "env")


class Place:
    """A repository with only what the script reads, and a PATH with only what the test puts there."""

    def __init__(self, root: Path, tmp: Path):
        self.repo, self.bin, self.log = tmp / "a repository", tmp / "bin", tmp / "log"
        (self.repo / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(root / "scripts/k3train", self.repo / "scripts/k3train")
        for name in ("constraints.txt", "constraints-cuda13.txt", "pyproject.toml"):
            (self.repo / name).write_text("x\n")
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.log.touch()
        self.env = {"PATH": str(self.bin), "FAKE_LOG": str(self.log), "HOME": str(tmp / "home")}

    def program(self, name: str, text: str = PYTHON) -> None:
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *args: str, **env: str) -> subprocess.Popen:
        return subprocess.Popen(
            [self.repo / "scripts/k3train", *args],
            env=self.env | env,
            cwd=self.bin,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *args: str, **env: str) -> tuple[int, str, str]:
        process = self.start(*args, **env)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def installs(self) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if line.startswith(("pip", "uv pip"))]


@pytest.fixture
def place(root, tmp_path) -> Place:
    return Place(root, tmp_path)


def test_first_run_installs_and_the_second_only_starts(place):
    place.program("python3.12")
    code, out, _ = place.run("train", "a b.yaml")
    assert (code, out) == (0, f"ran in {place.bin}: train a b.yaml\n")
    assert place.installs() == ["pip install --quiet --disable-pip-version-check -c constraints.txt -e ."]
    assert place.run("train")[0::2] == (0, "")
    assert len(place.installs()) == 1


def test_shims_that_fail_are_passed_over(place):
    place.program("python3.14", SHIM)
    place.program("python3.12", SHIM)
    place.program("../home/.pyenv/versions/3.12.1/bin/python")
    assert place.run("train")[0] == 0
    assert "/.pyenv/versions/3.12.1/bin/python" in place.log.read_text()


def test_named_python_goes_first(place):
    place.program("python3.14")
    place.program("mine")
    assert place.run("train", K3TRAIN_PYTHON=str(place.bin / "mine"))[0] == 0
    assert f"venv {place.bin}/mine" in place.log.read_text()
    shutil.rmtree(place.repo / ".venv")
    code, _, err = place.run("train", K3TRAIN_PYTHON="/no/such/python")
    assert code == 3
    assert "K3TRAIN_PYTHON=/no/such/python" in err


@pytest.mark.parametrize("present", [[], ["python3"]], ids=["none", "old"])
def test_no_python_is_one_line_and_exit_3(place, present):
    for name in present:
        place.program(name)
    code, out, err = place.run("train", FAKE_OLD="1")
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert "no Python >= 3.12" in err


def test_failed_installation_tells_its_error_and_exits_3(place):
    place.program("python3.12")
    code, _, err = place.run("train", FAKE_FAIL="1")
    assert code == 3
    assert err.splitlines()[-1].startswith("k3train: error: installation failed: ERROR: no such package")
    assert place.run("train")[0] == 0


def test_extras_have_their_own_stamps(place):
    place.program("python3.12")
    for command in ("train", "test", "train", "test"):
        assert place.run(command)[0] == 0
    assert [line.split()[-1] for line in place.installs()] == [".", ".[dev]"]


def test_changed_constraints_install_again(place):
    place.program("python3.12")
    place.run("train")
    (place.repo / "constraints.txt").write_text("y\n")
    assert place.run("train")[0] == 0
    assert len(place.installs()) == 2
    assert place.log.read_text().count("venv ") == 1


def test_moved_repository_installs_again(place):
    place.program("python3.12")
    place.run("train")
    place.repo = place.repo.rename(place.repo.with_name("elsewhere"))
    assert place.run("train")[0] == 0
    assert len(place.installs()) == 2


@pytest.mark.parametrize("lock", ["flock", "mkdir"])
def test_killed_installation_is_begun_anew(place, lock):
    if lock == "flock":
        (place.bin / "flock").symlink_to(shutil.which("flock") or pytest.skip("no flock on this machine"))
    place.program("python3.12")
    process = place.start("train", FAKE_SLEEP="20")
    while not place.installs():
        assert process.poll() is None
    os.killpg(process.pid, 9)
    process.communicate()
    code, _, err = place.run("train")
    assert code == 0
    assert "interrupted" in err
    assert place.log.read_text().count("venv ") == 2


@pytest.mark.parametrize("lock", ["flock", "mkdir"])
def test_two_first_runs_at_once_install_once(place, lock):
    if lock == "flock":
        (place.bin / "flock").symlink_to(shutil.which("flock") or pytest.skip("no flock on this machine"))
    place.program("python3.12")
    processes = [place.start("train", FAKE_SLEEP="1") for _ in range(2)]
    assert [process.wait(30) for process in processes] == [0, 0]
    for process in processes:
        process.communicate()
    assert len(place.installs()) == 1


def test_uv_is_used_where_it_is_there(place):
    place.program("python3.12")
    place.program(
        "uv",
        """#!/bin/sh
echo "uv $*" >>"$FAKE_LOG"
venv=$(cd "$FAKE_REPO" && pwd)/.venv
mkdir -p "$venv/bin"
case $1 in
venv) cp "$FAKE_PYTHON" "$venv/bin/python" ;;
pip) "$venv/bin/python" -m pip made ;;
esac
""",
    )
    env = {"FAKE_REPO": str(place.repo), "FAKE_PYTHON": str(place.bin / "python3.12")}
    assert place.run("train", **env)[0] == 0
    lines = place.log.read_text().splitlines()
    assert lines[0].startswith("uv venv") and "--seed" in lines[0]
    assert lines[1].startswith("uv pip install") and lines[1].endswith("-c constraints.txt -e .")


def test_a_gpu_brings_its_extra_and_can_be_overruled(place):
    place.program("python3.12")
    place.program("nvidia-smi", "#!/bin/sh\necho GPU 0\n")
    code, _, err = place.run("train", K3TRAIN_ACCELERATOR="cpu")
    assert (code, "cuda13" in err) == (0, False)
    shutil.rmtree(place.repo / ".venv")
    code, _, err = place.run("test")
    assert (code, "cuda13" in err) == (0, True)
    assert place.installs()[-1].endswith("-c constraints-cuda13.txt -c constraints.txt -e .[dev,cuda13]")
    assert place.run("test")[2] == ""
    assert place.run("train", K3TRAIN_ACCELERATOR="abacus")[0] == 3
