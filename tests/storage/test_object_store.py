"""Reading and writing objects: listings are fresh, one of several makers wins, what goes wrong is said plainly."""

import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import tiny
import yaml
from etils.epath import Path as AnyPath

from k3train.checkpoint.files import names_in
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import create, delete, get, objects_below, put


@pytest.fixture(params=["s3", "gcs"])
def store(request) -> str:
    return request.getfixturevalue(request.param)


def test_objects(store):
    assert get(f"{store}/a") is None and objects_below(store) == {} and names_in(AnyPath(store)) == []
    put(f"{store}/a", b"one")
    put(f"{store}/b/c", b"three")
    first = objects_below(store)
    assert {name: stamp.size for name, stamp in first.items()} == {"a": 3, "b/c": 5}
    assert names_in(AnyPath(store)) == ["a", "b"] and get(f"{store}/b/c") == b"three"
    put(f"{store}/a", b"two")
    again = objects_below(store)
    assert again["a"].version != first["a"].version and again["b/c"] == first["b/c"]
    delete(f"{store}/a")
    delete(f"{store}/a")
    assert list(objects_below(store)) == ["b/c"]


def test_only_one_makes_an_object(s3):
    assert create(f"{s3}/lock", b"first") and not create(f"{s3}/lock", b"second")
    assert get(f"{s3}/lock") == b"first"


def test_what_others_write_is_seen_at_once(s3, s3_server):
    """TensorStore and other hosts write beside fsspec, which would believe its earlier listings."""
    bucket, _, key = s3.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=s3_server)
    put(f"{s3}/steps/5/manifest.json", b"{}")
    assert names_in(AnyPath(f"{s3}/steps")) == ["5"] and list(objects_below(f"{s3}/steps")) == ["5/manifest.json"]
    client.put_object(Bucket=bucket, Key=f"{key}/steps/10/manifest.json", Body=b"{}")
    assert names_in(AnyPath(f"{s3}/steps")) == ["10", "5"] and len(objects_below(f"{s3}/steps")) == 2
    assert (AnyPath(f"{s3}/steps/10") / "manifest.json").exists()
    client.delete_object(Bucket=bucket, Key=f"{key}/steps/5/manifest.json")
    assert names_in(AnyPath(f"{s3}/steps")) == ["10"] and not AnyPath(f"{s3}/steps/5").is_dir()


@pytest.mark.parametrize(
    ("command", "environment", "code", "message"),
    [
        ("train", {}, ExitCode.RUN_FOLDER, "s3://no-such-bucket/run: cannot"),
        ("train", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ExitCode.RUN_FOLDER, "Could not connect to the endpoint"),
        ("ckpt", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, ExitCode.CHECKPOINT, "Could not connect to the endpoint"),
    ],
)
def test_a_store_that_is_not_there(s3_server, tmp_path: Path, command, environment, code, message):
    exp = tiny.experiment(tmp_path, run={"dir": "s3://no-such-bucket/run", "mirror": str(tmp_path / "mirror")})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(exp.model_dump(mode="json")))
    words = ["train", str(tmp_path / "run.yaml")] if command == "train" else ["ckpt", "list", exp.run.dir]
    done = subprocess.run(
        [sys.executable, "-m", "k3train", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr, done.stderr
