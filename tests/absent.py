"""Programs compiled for devices that need not be there, in a process of their own."""

import importlib.util
import os
import subprocess
import sys
from typing import Literal

from mosaic_gpu_sass import tool


def missing(kind: Literal["gpu", "tpu"]) -> str | None:
    """What is not installed that compiling for it needs."""
    if kind == "tpu":
        return None if importlib.util.find_spec("libtpu") else "libtpu is not installed"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax-cuda13-plugin is not installed"
    return None if tool("ptxas") else "no ptxas"


def compiled(*arguments: str, seconds: float = 600, **settings: str) -> str:
    """The last line that ``python ARGUMENTS`` prints; it finds what this process finds.

    Args:
      arguments: of the interpreter.
      seconds: it may take.
      settings: further variables of its environment.
    """
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join(sys.path)} | settings
    environ.pop("XLA_FLAGS", None)
    done = subprocess.run([sys.executable, *arguments], env=environ, capture_output=True, text=True, timeout=seconds)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
