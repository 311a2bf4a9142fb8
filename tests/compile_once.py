"""Processes of one run compile a program once: the first does, the others wait and read it from the cache folder.

JAX hashes into a program's key which devices are the process's own, so that on CPU only the first process would ever
find its programs again; the others would compile while it waits for them in its first collective, and not for ever.
"""

import time
from pathlib import Path

import jax
from jax._src import cache_key, compiler, distributed

WAIT_S = 240.0


def share_programs(wait_s: float = WAIT_S) -> None:
    """For a process with launch.environment, before it compiles; what is not there after ``wait_s`` it compiles."""
    hashed_options = cache_key._hash_serialized_compile_options
    cache_key._hash_accelerator_config = cache_key._hash_devices
    cache_key._hash_serialized_compile_options = lambda key, options, **_: hashed_options(key, options, True)
    read, write = compiler._cache_read, compiler._cache_write

    def mark(key: str) -> Path:
        return Path(jax.config.jax_compilation_cache_dir) / f"{key}-complete"

    def patient_read(module_name, key, options, backend, devices, *rest):
        # Programs of this process's devices alone are none of the first's business.
        if distributed.global_state.process_id and len({d.process_index for d in devices}) > 1:
            end = time.monotonic() + wait_s
            while not mark(key).exists() and time.monotonic() < end:
                time.sleep(0.02)
        return read(module_name, key, options, backend, devices, *rest)

    def marked_write(key, *rest):
        write(key, *rest)
        if distributed.global_state.process_id == 0:
            mark(key).touch()

    compiler._cache_read, compiler._cache_write = patient_read, marked_write
