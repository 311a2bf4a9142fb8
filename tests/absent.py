"""Programs compiled for devices that need not be there, in a process of their own."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

import pytest

TARGETS = os.environ.get("K3TRAIN_TEST_TARGETS", "")
"""Folder of ``tests/targets.txt``, where ``k3train test --targets`` has installed it."""


def need(kind: Literal["gpu", "tpu"]) -> None:
    """Skips the test where what compiles for the devices is not installed; fails where it was to be."""
    lacks = _missing("libtpu" if kind == "tpu" else "jax_cuda13_plugin")
    if kind == "gpu":
        lacks = lacks or next((f"no {name}" for name in ("ptxas", "nvdisasm") if not tool(name)), None)
    if lacks and TARGETS:
        pytest.fail(f"{lacks}, though K3TRAIN_TEST_TARGETS is {TARGETS}")
    if lacks:
        pytest.skip(f"{lacks}; k3train test --targets installs it")


def _missing(module: str) -> str | None:
    return None if PathFinder.find_spec(module, [TARGETS, *sys.path]) else f"{module} is not installed"


def tool(name: str) -> str | None:
    """Path of a CUDA tool: in NVIDIA's Python packages, or on PATH."""
    places = [Path(p) / "nvidia" for p in (TARGETS, *sys.path) if p and (Path(p) / "nvidia").is_dir()]
    found = (str(file) for place in places for file in place.glob(f"*/bin/{name}"))
    return next(found, shutil.which(name))


def compiled(*arguments: str, seconds: float = 600, **settings: str) -> str:
    """The last line that ``python ARGUMENTS`` prints; it finds what this process finds.

    Args:
      arguments: of the interpreter.
      seconds: it may take.
      settings: further variables of its environment.
    """
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join([*filter(None, [TARGETS]), *sys.path])} | settings
    environ.pop("XLA_FLAGS", None)
    if ptxas := tool("ptxas"):
        environ["PATH"] = os.pathsep.join([str(Path(ptxas).parent), environ.get("PATH", os.defpath)])
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=seconds)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
