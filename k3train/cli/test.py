"""``k3train test``: what CI runs, each step timed; the first failure does not hide the later ones."""

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from k3train.config.cache import user_cache
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what pytest receives."""
    parser.add_argument(
        "--targets",
        action="store_true",
        help="first install the compilers of GPUs and TPUs (tests/targets.txt, about 500 MB, kept in the cache); "
        "without them, tests that compile for such devices are skipped",
    )
    parser.add_argument("pytest", nargs="*", metavar="PYTEST_ARG", help="passed to pytest; put -- before options")


def steps(pytest_args: list[str]) -> dict[str, list[str]]:
    """Command lines of the steps, by name, in order; pytest comes last so that its closing line ends the output."""
    python = sys.executable
    return {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "pyright": [python, "-m", "pyright"],
        "pytest": [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", *pytest_args],
    }


def install_targets() -> Path:
    """The folder with the packages of ``tests/targets.txt``, installed there where they are not yet.

    Raises:
      UserError: the installation failed.
    """
    listed = ROOT / "tests" / "targets.txt"
    name = hashlib.sha256(listed.read_bytes() + sys.version.encode()).hexdigest()[:16]
    cache = user_cache("targets")
    folder, making = cache / name, cache / f".{name}.{os.getpid()}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        if subprocess.run([*pip, "--target", str(making), "-r", str(listed)]).returncode:
            shutil.rmtree(making, ignore_errors=True)
            raise UserError(f"{listed}: the installation failed, see above; leave --targets out", ExitCode.SETUP)
        with contextlib.suppress(OSError):  # another process was faster
            making.rename(folder)
        shutil.rmtree(making, ignore_errors=True)
    return folder


def environment(bytecode: str) -> dict[str, str]:
    """Variables of the steps: what makes processes start and compile quickly, whatever the caller's are.

    Args:
      bytecode: a folder for compiled modules. Hundreds of processes import JAX, each for 7 s instead of 2 where none
        are kept.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # Compilers allocate and free without end; memory that goes back to the system each time costs an eighth of it all.
    memory = {"MALLOC_TRIM_THRESHOLD_": 2**30, "MALLOC_TOP_PAD_": 2**26, "MALLOC_MMAP_THRESHOLD_": 2**29}
    return {name: str(value) for name, value in memory.items()} | {
        "PYTHONPYCACHEPREFIX": bytecode,
        # Pyright's wrapper would ask the registry for a newer release at every start.
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        **kept,
    }


def run(args: argparse.Namespace) -> int:
    """Runs every step in the repository; 1 where any failed.

    Raises:
      UserError: where k3train was not installed from its repository, which holds the tests.
    """
    if not (ROOT / "tests").is_dir():
        raise UserError("k3train test runs in the repository: clone it and use scripts/k3train test", ExitCode.SETUP)
    failed, times, more = [], [], {}
    if args.targets or os.environ.get("K3TRAIN_TEST_TARGETS") == "install":
        print("== targets", flush=True)
        start = time.perf_counter()
        more["K3TRAIN_TEST_TARGETS"] = str(install_targets())
        times.append(f"targets {time.perf_counter() - start:.1f} s")
    with tempfile.TemporaryDirectory(prefix="k3train-bytecode-", ignore_cleanup_errors=True) as bytecode:
        for name, command in steps(args.pytest).items():
            print(f"== {name}", flush=True)
            start = time.perf_counter()
            if subprocess.run(command, cwd=ROOT, env=environment(bytecode) | more).returncode:
                failed.append(name)
            times.append(f"{name} {time.perf_counter() - start:.1f} s")
    print("== " + ", ".join(times))
    if failed:
        print(f"== failed: {', '.join(failed)}")
    return int(ExitCode.BUG if failed else ExitCode.FINISHED)
