"""Every case of a folder of reference numbers, forward and gradient, within the stated tolerance.

The folder is ``tests/goldens`` or what ``K3TRAIN_GOLDENS`` names; another folder of the same form runs unchanged,
since a case is recognised by what it holds. What waits for a later part of the work is skipped by name and reason.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_cases import attn_residual, kda, mla, models, moe

FOLDER = Path(os.environ.get("K3TRAIN_GOLDENS", Path(__file__).parent / "goldens"))
INDEX = json.loads((FOLDER / "index.json").read_text())
KINDS = (models, kda, mla, moe, attn_residual)
PENDING = {"vision": "MoonViT-V2 comes with the vision issue", "mxfp4": "MXFP4 comes with its own issue"}


@dataclass
class Case:
    """One case: its name, arrays, index entry, and the folder of a whole model's checkpoint."""

    name: str
    spec: dict
    folder: Path
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> "Case":
        file = FOLDER / INDEX[name]["file"]
        with np.load(file) as stored:
            return cls(name, INDEX[name], file.parent, dict(stored))


def pending(case: Case) -> str | None:
    """Why a case cannot run yet, by what it holds."""
    if any(name.startswith(("pixel", "out_rope_angle", "small_pixel")) for name in case.arrays):
        return PENDING["vision"]
    if "packed" in case.arrays and "scale" in case.arrays:
        return PENDING["mxfp4"]
    return None


def check(case: Case, got: dict[str, np.ndarray], tolerance: str) -> list[str]:
    """What differs: every array with a tolerance must have been computed and lie within it."""
    faults = []
    for name, entry in case.spec["arrays"].items():
        if not name.startswith(("out_", "grad.", "trace.", "gradnorm_values")):
            continue
        want = case.arrays[name]
        if name not in got:
            faults.append(f"{name}: not computed")
            continue
        have = np.asarray(got[name])
        if "entry by entry" in entry.get("note", ""):  # norms of many sizes: each relative to itself
            unused = np.isnan(want)  # the reference has no gradient at all there
            if np.any(have[unused]):
                faults.append(f"{name}: weights that the reference does not use have a gradient")
            live = ~unused & (want != 0)
            have, want = have[live] / want[live], np.ones(live.sum())
        if have.shape != want.shape:
            faults.append(f"{name}: shape {have.shape}, want {want.shape}")
        elif not np.issubdtype(want.dtype, np.floating) or not np.any(want):
            if not np.array_equal(have, want):
                faults.append(f"{name}: differs from exact values")
        else:
            scale = max(np.abs(want).max(), entry.get("floor", 0.0))
            error = np.abs(have.astype(np.float64) - want).max() / scale
            if not error <= entry[tolerance]:
                faults.append(f"{name}: error {error:.2e} above {entry[tolerance]:.0e}")
    return faults


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", list(INDEX))
def test_golden(name: str, dtype: str):
    case = Case.load(name)
    if reason := pending(case):
        pytest.skip(f"{name}: {reason}")
    kind = next((kind for kind in KINDS if kind.matches(case)), None)
    assert kind is not None, f"no code recognises the case {name}"
    with jax.enable_x64(dtype == "float64"):
        got = kind.compute(case, np.dtype(dtype))
    faults = check(case, got, "tol_f32" if dtype == "float32" else "tol_x64")
    assert not faults, "\n".join(faults)
