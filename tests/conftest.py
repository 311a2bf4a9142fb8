"""Settings under which every test runs: CPU, four forced devices, strict dtypes and ranks."""

import os
from contextlib import contextmanager
from pathlib import Path

os.environ["JAX_PLATFORMS"] = os.environ.get("K3TRAIN_TEST_PLATFORM", "cpu")
# Tests compile far longer than they run, so the code generator may do without optimising (half the time).
for flag in ("--xla_force_host_platform_device_count=4", "--xla_backend_optimization_level=0"):
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

import hypothesis  # noqa: E402
import jax  # noqa: E402 - the settings above must come first
import pytest  # noqa: E402

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# No persistent compilation cache in this process: writing one of hundreds of executables has crashed it (docs/log.md).
jax.config.update("jax_enable_compilation_cache", False)

ROOT = Path(__file__).parent.parent


# Minutes a test: begun last, one worker would end alone with them. The order of a file's own tests stays.
LONGEST = ("tests/parallel/test_parity.py", "tests/e2e/test_elastic.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, file in enumerate(LONGEST) if item.nodeid.startswith(file)), 9))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def as_nobody(tmp_path: Path):
    """A context in which the system refuses what it would refuse any stranger, the test's folder itself excepted."""

    @contextmanager
    def nobody():
        for folder in (tmp_path, *tmp_path.parents):
            if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o010:
                folder.chmod(folder.stat().st_mode | 0o011)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    return nobody
