"""Too little device memory ends in one message."""

from pathlib import Path

import jax
import pytest
import tiny

from k3train.config.exit_codes import ExitCode
from k3train.train.memory import out_of_memory


def test_the_runtimes_refusal_is_a_message_with_cures(tmp_path: Path):
    exp = tiny.experiment(tmp_path, train={"remat": "none"})
    with pytest.raises(jax.errors.JaxRuntimeError) as refused:
        jax.numpy.zeros((1 << 50,), jax.numpy.int8).block_until_ready()
    found = out_of_memory(refused.value, exp)
    assert found is not None and found.exit_code == ExitCode.PLAN
    for word in ("train.accumulation", "train.remat: full", "mesh.fsdp"):
        assert word in str(found)


def test_other_errors_stay_as_they_are(tmp_path: Path):
    assert out_of_memory(ValueError("RESOURCE_EXHAUSTED"), tiny.experiment(tmp_path)) is None
