"""Addresses of object stores: which they are, and what is said where the package is missing."""

import importlib.util

import pytest

from k3train.config import object_store as module
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import in_object_store, make_ready


def test_addresses_and_folders():
    assert in_object_store("s3://b/run") and in_object_store("gs://b")
    assert not in_object_store("/a/b") and not in_object_store("runs/a")
    make_ready("/a/b")


def test_a_store_nobody_knows():
    with pytest.raises(UserError, match=r"ftp://: no such object store; s3:// and gs:// are known"):
        make_ready("ftp://host/run")


@pytest.mark.parametrize(("address", "package", "extra"), [("s3://b/r", "s3fs", "s3"), ("gs://b/r", "gcsfs", "gcs")])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, address, package, extra):
    module._prepare.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"needs the package {package}.*k3train\[{extra}\]") as caught:
        make_ready(address)
    assert caught.value.exit_code == ExitCode.RUN_FOLDER
