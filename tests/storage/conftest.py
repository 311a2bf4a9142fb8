"""Object stores on loopback: an S3 API server and a GCS emulator, in threads of this process."""

import logging
import os
import socket
import uuid
from collections.abc import Iterator

import pytest

BUCKET = "k3train-test"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 API server with one bucket; the environment leads every client, and child processes, to it."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (KEYS | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}).items():
            patch.setenv(key, value)
        from k3train.config.object_store import filesystem

        filesystem("s3://").mkdir(BUCKET)
        yield os.environ["AWS_ENDPOINT_URL"]
    server.stop()


@pytest.fixture(scope="session")
def gcs_server() -> Iterator[str]:
    """A GCS emulator with one bucket."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    address = f"http://127.0.0.1:{port}"
    settings = {
        "STORAGE_EMULATOR_HOST": address,
        "GOOGLE_CLOUD_PROJECT": "test",
        "TENSORSTORE_GCS_HTTP_URL": address,
        "TENSORSTORE_GCS_HTTP_VERSION": "1.1",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
    }
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(key, value)
        from gcsfs.extended_gcsfs import BucketType, ExtendedGcsFileSystem

        async def flat(self, bucket):
            return BucketType.NON_HIERARCHICAL

        # The emulator has no control plane to ask.
        patch.setattr(ExtendedGcsFileSystem, "_get_bucket_type", flat)
        yield address
    server.stop()


@pytest.fixture
def s3(s3_server: str) -> str:
    """An address of its own in the S3 server."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"


@pytest.fixture
def gcs(gcs_server: str) -> str:
    """An address of its own in the GCS emulator."""
    return f"gs://{BUCKET}/{uuid.uuid4().hex[:8]}"
