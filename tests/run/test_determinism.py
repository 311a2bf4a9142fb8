"""Strict determinism: flags, the kept autotuning results, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from k3train.config.drift import Change
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.section import Drift
from k3train.run.determinism import Strict, own_flags, read_kept, refuse_changes


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_own=1")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)


def test_the_first_attempts_results_are_kept_and_used(tmp_path):
    first = Strict(None)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_own=1", "--xla_gpu_exclude_nondeterministic_ops=true"]
    dumped = next(flag for flag in flags if "dump_autotune" in flag).partition("=")[2]
    dumped = Path(dumped)
    first.keep(tmp_path)
    assert read_kept(tmp_path) is None  # no GPU, nothing dumped
    dumped.write_text("version: 3")
    first.keep(tmp_path)
    first.close()
    assert read_kept(tmp_path) == "version: 3" and not dumped.exists()
    os.environ["XLA_FLAGS"] = "--xla_own=1"
    second = Strict(read_kept(tmp_path))
    loaded = next(flag for flag in os.environ["XLA_FLAGS"].split() if "load_autotune" in flag).partition("=")[2]
    assert Path(loaded).read_text() == "version: 3"
    assert "dump_autotune" not in os.environ["XLA_FLAGS"]
    assert own_flags(os.environ["XLA_FLAGS"]) == "--xla_own=1"
    second.keep(tmp_path)
    second.close()
    assert not Path(loaded).exists()


def test_other_surroundings_are_refused_by_name():
    changes = [
        Change("versions.jaxlib", "1", "2", Drift.DERIVED),
        Change("devices.kind", "A", "B", Drift.DERIVED),
        Change("git_commit", "a", "b", Drift.DERIVED),
    ]
    with pytest.raises(UserError, match=r"versions.jaxlib: was 1, now 2\n  devices.kind: was A, now B\n") as caught:
        refuse_changes([], changes)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER
    refuse_changes([], changes[2:])
    refuse_changes([Change("run.determinism", "off", "strict", Drift.FREE)], changes)


def test_the_installed_xla_knows_the_flags():
    """An unknown flag ends the process."""
    for value in ("None", repr("")):
        code = f"""
from k3train.run.determinism import Strict
strict = Strict({value})
import jax
assert jax.jit(lambda x: x + 1)(1) == 2
strict.close()
"""
        env = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
