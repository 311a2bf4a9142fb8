"""``run.determinism: strict``: after a resume, the bits that would have been. JAX is imported when it is asked for.

On a GPU the same program gives other bits where kernels add in any order, or where autotuning, which measures, picked
another kernel. So kernels of the first sort are excluded, and no compiled program is taken from a cache that other
runs fill. XLA of jaxlib 0.11.2 then tunes nothing either; where a version does, the results of the first attempt are
kept in the run folder and used by all later ones. Keeping the results without excluding kernels cost no speed, but was
not enough (docs/log.md, 2026-11-30).
"""

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from k3train.config.drift import Change
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.storage import write_whole

AUTOTUNE = "autotune.txt"
COST = (
    "run.determinism is strict: kernels that add in any order, and on a GPU autotuning, are off (steps took 3.8 times "
    "as long on an H200), every start compiles anew, and a resume needs the same versions, flags, devices and process "
    "count"
)
_EXCLUDE = "--xla_gpu_exclude_nondeterministic_ops=true"
_DUMP, _LOAD = "--xla_gpu_dump_autotune_results_to=", "--xla_gpu_load_autotune_results_from="
_FIXED = ("versions.", "devices.", "xla_flags", "processes")


class Strict:
    """The settings of one process, made before JAX looks for its devices.

    Args:
      kept: the autotuning results of the run's first attempt; None where there are none yet.
    """

    def __init__(self, kept: str | None):
        handle, name = tempfile.mkstemp(prefix="k3train-autotune-", suffix=".txt")
        os.close(handle)
        self._file, self._known = Path(name), kept is not None
        flags = [_EXCLUDE]
        if kept is None:
            self._file.unlink()  # XLA makes it
            flags.append(_DUMP + name)
        else:
            self._file.write_text(kept)
            flags.append(_LOAD + name)
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
        import jax

        jax.config.update("jax_enable_compilation_cache", False)

    def keep(self, folder: Path) -> None:
        """Everything is compiled: keep the first attempt's results, if XLA left any. Process 0."""
        if not self._known and self._file.exists() and self._file.stat().st_size:
            write_whole(folder / AUTOTUNE, self._file.read_text())

    def close(self) -> None:
        """Delete the temporary file."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def read_kept(folder: Path) -> str | None:
    """The autotuning results that a run folder holds."""
    file = folder / AUTOTUNE
    return file.read_text() if file.exists() else None


def own_flags(flags: str) -> str:
    """``XLA_FLAGS`` without those that are set here."""
    return " ".join(flag for flag in flags.split() if flag != _EXCLUDE and not flag.startswith((_DUMP, _LOAD)))


def refuse_changes(config: Iterable[Change], surroundings: Iterable[Change]) -> None:
    """Refuse to go on in surroundings that give other bits, unless strictness itself is new.

    Args:
      config: keys that differ from the attempt before.
      surroundings: facts that do.

    Raises:
      UserError: versions, flags, devices or the process count differ (exit 33); each is named.
    """
    found = [
        f"  {c.key}: was {c.was or '(none)'}, now {c.now or '(none)'}" for c in surroundings if c.key.startswith(_FIXED)
    ]
    if found and not any(change.key == "run.determinism" for change in config):
        raise UserError(
            "run.determinism is strict, and these surroundings would give other bits than the ones before:\n"
            + "\n".join(found)
            + "\nGo on in the same surroundings, or set run.determinism: off",
            ExitCode.RUN_FOLDER,
        )
