"""What an attempt ran on: versions, host, devices, commit. JAX is imported when asked for devices only."""

import os
import platform
import socket
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from k3train.run.determinism import own_flags

_PACKAGES = ("k3train", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a run."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_commit(folder: Path | None = None) -> str | None:
    """Commit of the checkout that k3train runs from, ``-dirty`` where tracked files differ; None outside of git."""
    where = folder or Path(__file__).parent
    command = ["git", "-C", str(where), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def facts() -> dict[str, Any]:
    """Everything an attempt's start line says of its surroundings; starts JAX's devices."""
    import jax

    devices = jax.devices()
    return {
        "versions": versions(),
        "host": socket.gethostname(),
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "processes": jax.process_count(),
        "git_commit": git_commit(),
        "xla_flags": own_flags(os.environ.get("XLA_FLAGS", "")),
    }
