"""Orbax in object stores: how it commits there, and which TensorStore driver it takes.

``gs://`` is Orbax's own. For ``s3://`` it has file operations (through fsspec) but no driver for the arrays: it
describes stores of files and of ``gs://`` only. TensorStore's two drivers take the same description but for their
names, so an address in S3 is described as one in GCS, and the driver named anew.
"""

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Any

from orbax.checkpoint import v1 as ocp

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import in_object_store, make_ready

# TensorStore's own patience is a quarter of an hour; a save has a time limit and is tried again.
RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "10s"}
_S3 = re.compile(r"s3:/+")


def orbax_context(folder: object) -> ocp.Context:
    """The context in which Orbax saves to or loads from ``folder``, on disk or in an object store.

    Raises:
      UserError: the store's package is missing, or this Orbax cannot be taught (exit 33).
    """
    make_ready(folder)
    context = ocp.Context()
    if in_object_store(folder):
        # A rename of many objects is many copies; a marker at the end is one write.
        context.atomicity.mode = ocp.options.AtomicityMode.COMMIT_FILE
        if _S3.match(str(folder)):
            _teach_s3()
    return context


@functools.cache
def _teach_s3() -> None:
    """Let the one function in which Orbax describes a store know S3."""
    from orbax.checkpoint._src.serialization import tensorstore_utils as module

    describe: Callable[..., dict] | None = getattr(module, "build_kvstore_tspec", None)
    if describe is None or "directory" not in inspect.signature(describe).parameters:
        raise UserError(
            "this version of orbax-checkpoint describes its stores in a way that k3train does not know, so it cannot "
            "save to s3://; install the one of constraints.txt",
            ExitCode.SETUP,
        )

    @functools.wraps(describe)
    def with_s3(directory: Any, *args: Any, **kwargs: Any) -> dict:
        scheme = _S3.match(str(directory))
        if scheme is None:
            return describe(directory, *args, **kwargs)
        return in_s3(describe(f"gs://{str(directory)[scheme.end() :]}", *args, **kwargs))

    module.build_kvstore_tspec = with_s3


def in_s3(spec: Any) -> Any:
    """A TensorStore description in which every store of GCS is one of S3."""
    if isinstance(spec, str) and spec.startswith("gs://"):
        bucket, _, path = spec.removeprefix("gs://").partition("/")
        spec = {"driver": "gcs", "bucket": bucket, "path": path}
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") not in ("gcs", "gcs_grpc"):
        return {key: in_s3(value) for key, value in spec.items()}
    return spec | {"driver": "s3", "s3_request_retries": RETRIES} | _settings()


def _settings() -> dict[str, Any]:
    """What TensorStore does not read from the environment by itself."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    settings: dict[str, Any] = {}
    if endpoint:
        settings["endpoint"] = endpoint
        # Any region will do where the store is not Amazon's; without one, Amazon would be asked.
        region = region or "us-east-1"
    if region:
        settings["aws_region"] = region
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        settings["aws_credentials"] = {"type": "environment"}  # without a word about files that are not there
    return settings
