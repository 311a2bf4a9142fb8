"""kill -9 and a full disk in the middle of a save: the previous checkpoint stays usable, the leftover is harmless."""

import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager

SCRIPT = """
import os, signal, sys
from pathlib import Path
import jax, numpy as np
from k3train.checkpoint import save as module
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.manager import CheckpointManager

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

directory, moment = Path(sys.argv[1]), sys.argv[2]
manager = CheckpointManager(directory, CheckpointConfig())
state = {"w": jax.device_put(np.random.default_rng(0).normal(size=(1024, 4096)).astype(np.float32))}
manager.save(1, state, {"step": 1}, block=True)
if moment == "before the manifest":
    module.write_manifest = die
    manager.save(2, state, {"step": 2}, block=True)
else:
    manager.save(2, state, {"step": 2})
    while not any("tmp" in entry.name for entry in directory.iterdir()):
        pass
    die()
"""


@pytest.mark.parametrize("moment", ["while Orbax writes", "before the manifest"])
def test_kill_during_save(tmp_path, moment):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), moment],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    notes = []
    manager = CheckpointManager(tmp_path, CheckpointConfig(), note=notes.append)
    assert manager.steps() == [1] and manager.newest_good() == 1
    leftovers = [entry.name for entry in tmp_path.iterdir() if entry.name != "1"]
    assert leftovers and all(name.startswith("2") for name in leftovers)
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = {"w": jax.ShapeDtypeStruct((1024, 4096), np.float32, sharding=sharding)}
    state, meta = manager.restore(1, abstract)
    wanted = np.random.default_rng(0).normal(size=(1024, 4096)).astype(np.float32)
    assert np.array_equal(state["w"], wanted) and meta == {"step": 1}
    manager.save(2, state, {"step": 2}, block=True)
    assert manager.steps() == [1, 2] and [entry.name for entry in sorted(tmp_path.iterdir())] == ["1", "2"]
    assert any("never ended" in note for note in notes)


FULL = """
import resource, signal, sys
from pathlib import Path
import jax, numpy as np
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
manager = CheckpointManager(Path(sys.argv[1]), CheckpointConfig())
state = {"w": jax.device_put(np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32))}
manager.save(1, state, {"step": 1}, block=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
manager.save(2, state, {"step": 2})
try:
    manager.wait()
except SaveFailed as error:
    print("FAILED", error.step, manager.steps(), manager.verify(1), str(error)[:300].replace(chr(10), " "))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
manager.save(2, state, {"step": 2}, block=True)
print("THEN", manager.steps(), manager.verify(2))
"""


def test_a_full_disk_fails_the_save_and_keeps_the_older_one(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: the system refuses what Orbax writes."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("FAILED", "THEN")))
    assert said["FAILED"].startswith("2 [1] []"), done.stdout
    assert "saving step 2 failed" in said["FAILED"] and said["THEN"] == "[1, 2] []"


TMPFS = """
import sys
from pathlib import Path
import jax, numpy as np
from k3train.checkpoint.config import CheckpointConfig
from k3train.checkpoint.errors import SaveFailed
from k3train.checkpoint.manager import CheckpointManager

directory = Path(sys.argv[1])
notes = []
manager = CheckpointManager(directory, CheckpointConfig(keep=1, max_failures=2), note=notes.append)
# Noise does not compress: 4 MiB a checkpoint, of which a disk of 10 MiB holds two, but not three.
state = {"w": jax.device_put(np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32))}
manager.save(1, state, {"step": 1}, block=True)
(directory.parent / "filler").write_bytes(bytes(4 << 20))
for step in (2, 3):
    try:
        manager.save(step, state, {"step": step}, block=True)
    except SaveFailed as error:
        print("FAILED", step, manager.failures, manager.exhausted, manager.steps(), manager.verify(1), error)
(directory.parent / "filler").unlink()
for step in (4, 5):
    manager.save(step, state, {"step": step}, block=True)
print("THEN", manager.steps(), manager.verify(5), sorted(entry.name for entry in directory.iterdir()))
"""


def test_a_small_tmpfs(tmp_path):
    """A file system that is truly full. Needs a mount namespace, which some machines do not give."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=10m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*namespace, "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no mount namespace here")
    command = f"{mount} && mkdir {tmp_path}/run && exec {sys.executable} -c '{TMPFS}' {tmp_path}/run/checkpoints"
    done = subprocess.run([*namespace, "sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.split(" [1] []")[0] for line in failed] == ["FAILED 2 1 False", "FAILED 3 2 True"], done.stdout
    assert all("o space left" in line and "newest good checkpoint is step 1" in line for line in failed)
    assert "THEN [5] [] ['5']" in done.stdout
