"""Object stores (``s3://``, ``gs://``) through fsspec: made ready once, listed, read, written, claimed. Imports no JAX.

An object store has no rename, no append, no folders of their own and no locks. A put is whole or not at all, and a put
on the condition that there is no such object yet has one winner.

Where a store is, and who we are to it, is said by the environment, as for every other program: ``AWS_ENDPOINT_URL``,
``AWS_REGION``, ``AWS_ACCESS_KEY_ID`` and so on; ``GOOGLE_APPLICATION_CREDENTIALS``, ``STORAGE_EMULATOR_HOST``.
"""

import functools
import importlib.util
from typing import Any, NamedTuple

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

# Scheme -> the package that knows it, and the extra that installs it.
_PACKAGES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}


class Stamp(NamedTuple):
    """What a listing says of an object: its bytes, and a text that changes whenever it is written anew."""

    size: int
    version: str


def in_object_store(path: object) -> bool:
    """Whether a path is an address of an object store rather than a place on a disk."""
    return "://" in str(path)


def make_ready(path: object) -> None:
    """Prepare for ``path``; to be called before anything is read or written there. On a disk, nothing is needed.

    Raises:
      UserError: no such kind of store, or its package is not installed (exit 33).
    """
    if in_object_store(path):
        _prepare(str(path).partition("://")[0])


@functools.cache
def _prepare(scheme: str) -> None:
    if scheme not in _PACKAGES:
        known = " and ".join(f"{name}://" for name in _PACKAGES)
        raise UserError(f"{scheme}://: no such object store; {known} are known", ExitCode.RUN_FOLDER)
    package, extra = _PACKAGES[scheme]
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"{scheme}:// needs the package {package}, which is not installed: pip install 'k3train[{extra}]'",
            ExitCode.RUN_FOLDER,
        )
    from fsspec.config import conf

    # Others write to the store too, and so does TensorStore beside fsspec: no listing is to be remembered.
    for name in {"s3": ("s3",), "gs": ("gs", "gcs")}[scheme]:
        conf.setdefault(name, {})["use_listings_cache"] = False
    if scheme == "s3":
        conf["s3"].setdefault("config_kwargs", {}).setdefault("connect_timeout", 10)


def filesystem(path: object) -> Any:
    """fsspec's file system for an address.

    Raises:
      UserError: see ``make_ready``.
    """
    make_ready(path)
    import fsspec

    return fsspec.filesystem("s3" if str(path).startswith("s3://") else "gcs")


def objects_below(folder: object) -> dict[str, Stamp]:
    """Every object under ``folder``, by its name from there; one request a thousand."""
    fs = filesystem(folder)
    root = fs._strip_protocol(str(folder)).rstrip("/") + "/"
    found: dict[str, dict[str, Any]] = fs.find(root, detail=True)
    return {
        name.removeprefix(root): Stamp(
            int(info["size"]), str(info.get("ETag") or info.get("etag") or info.get("md5Hash"))
        )
        for name, info in sorted(found.items())
        if info["type"] == "file" and not name.endswith("/")
    }


def get(path: object) -> bytes | None:
    """An object's content; None where there is no such object."""
    try:
        return filesystem(path).cat_file(str(path))
    except FileNotFoundError:
        return None


def put(path: object, content: bytes) -> None:
    """Write an object, whole or not at all."""
    filesystem(path).pipe_file(str(path), content)


def create(path: object, content: bytes) -> bool:
    """Write an object if there is none of that name; whether it was done. Of several who try, one succeeds."""
    try:
        filesystem(path).pipe_file(str(path), content, mode="create")
    except FileExistsError:
        return False
    return True


def delete(path: object) -> None:
    """Remove an object, if it is there."""
    try:
        filesystem(path).rm_file(str(path))
    except FileNotFoundError:
        return
