"""The small files of a run folder in an object store: written on the local disk, put into the store. Imports no JAX.

An object store cannot append, so metrics and records are written to a mirror of the folder on the local disk, from
where whole objects are put: every few seconds, before every checkpoint is committed, and at the end. When a run
begins, the store is the truth, and the mirror is made equal to it. Checkpoints never go through the mirror.
"""

import hashlib
import json
import os
import threading
import time
from pathlib import Path

from k3train.checkpoint.layout import FOLDER as CHECKPOINTS
from k3train.config.cache import user_cache
from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.config.object_store import Stamp, delete, filesystem, in_object_store, objects_below
from k3train.config.storage import storage, write_whole

LEASE = "lock"
"""Folder of the lease's objects (run/lease.py), which the mirror leaves alone."""
_INDEX = ".mirror.json"
_SHARE = 20  # a file that takes a second to put is put every twenty seconds
Local = tuple[int, int]  # bytes and time of change of a local file


class Mirror:
    """A folder of the local disk and one of a store.

    Args:
      address: the run folder in the store.
      folder: its mirror; made where absent.
    """

    def __init__(self, address: str, folder: Path):
        self.address, self.folder = address.rstrip("/"), folder
        self._lock = threading.Lock()
        self._sent: dict[str, Local] = {}
        self._versions: dict[str, str] = {}
        self._next: dict[str, float] = {}

    def pull(self) -> None:
        """Make the mirror equal to the store: fetch what differs, remove what is not there.

        Raises:
          UserError: the store cannot be read, or the disk not be written (exit 33).
        """
        with self._lock, storage(self.address, "read the run folder"):
            self.folder.mkdir(parents=True, exist_ok=True)
            there = small_objects(self.address)
            known = self._read_index()
            for name, local in self._local().items():
                if name not in there:
                    (self.folder / name).unlink()
                elif known.get(name) == [there[name].version, *local]:
                    self._sent[name], self._versions[name] = local, there[name].version
            for name in there.keys() - self._sent.keys():
                path = self.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                part = path.with_name(f".{path.name}.part")
                filesystem(self.address).get_file(f"{self.address}/{name}", str(part))
                part.replace(path)
                self._sent[name], self._versions[name] = _look(path), there[name].version
            self._write_index()

    def push(self, everything: bool = True) -> None:
        """Put what has changed, and remove from the store what was removed here.

        Args:
          everything: also large files that were put a short while ago.

        Raises:
          UserError: the store refuses (exit 33); what could not be put is tried again by the next call.
        """
        with self._lock, storage(self.address, "write to the run folder"):
            there = self._local()
            for name, local in there.items():
                began = time.monotonic()
                if self._sent.get(name) == local or (not everything and began < self._next.get(name, 0.0)):
                    continue
                filesystem(self.address).put_file(str(self.folder / name), f"{self.address}/{name}")
                self._sent[name] = local
                self._versions.pop(name, None)
                self._next[name] = time.monotonic() + _SHARE * (time.monotonic() - began)
            for name in self._sent.keys() - there.keys():
                delete(f"{self.address}/{name}")
                del self._sent[name]

    def _local(self) -> dict[str, Local]:
        """Every file that belongs into the store, by its name; hidden ones and the local lock do not."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and path.name[:1] != "." and name != "run.lock":
                try:
                    found[name] = _look(path)
                except FileNotFoundError:  # replaced at this moment; the next push takes it
                    continue
        return found

    def _read_index(self) -> dict[str, list]:
        try:
            index = json.loads((self.folder / _INDEX).read_text())
        except (OSError, ValueError):
            return {}
        return index if isinstance(index, dict) else {}

    def _write_index(self) -> None:
        """Remember which version of each object the mirror holds, so that large files are not fetched in vain."""
        index = {name: [version, *self._sent[name]] for name, version in self._versions.items()}
        write_whole(self.folder / _INDEX, json.dumps(index))


def small_objects(address: str) -> dict[str, Stamp]:
    """The objects of a run folder but checkpoints and lease, by name."""
    apart = (f"{CHECKPOINTS}/", f"{LEASE}/")
    return {name: stamp for name, stamp in objects_below(address).items() if not name.startswith(apart)}


def mirror_folder(address: str, root: str | None = None, what: str = "") -> Path:
    """Where the mirror of a run folder lies: under ``root``, or the user's cache.

    Args:
      address: the run folder in the store.
      root: ``run.mirror``.
      what: for whom, where several mirrors of one folder are kept apart.
    """
    digest = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return (Path(root).expanduser().absolute() if root else user_cache("mirror")) / f"{digest}{what}"


def local_copy(folder: object) -> Path:
    """A run folder's small files on the local disk, to be read: itself there, a fresh copy of one in a store.

    Raises:
      UserError: the store cannot be read (exit 33), or holds nothing there (exit 31).
    """
    if not in_object_store(folder):
        return Path(os.fspath(folder))  # type: ignore[arg-type]
    address = str(folder)
    mirror = Mirror(address, mirror_folder(address, what="-copy"))
    mirror.pull()
    if not any(mirror.folder.iterdir()):
        raise UserError(f"{address}: there is no run", ExitCode.CHECKPOINT)
    return mirror.folder


def _look(path: Path) -> Local:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
