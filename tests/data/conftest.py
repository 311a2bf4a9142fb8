"""Small corpora and the stores made of them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from k3train.data.config import DataConfig
from k3train.data.prepare import prepare
from k3train.data.store import Store

WORDS = ["row", "token", "state", "gate", "expert", "router", "layer", "block", "мир", "你好", "naïve", "🙂"]


def quiet(_: object) -> None:
    """Takes what a person would be told."""


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """60 documents of 1 to 120 words, from one character to several rows."""
    random = np.random.default_rng(7)
    return ["x"] + [f"{i} " + " ".join(random.choice(WORDS, random.integers(1, 120))) for i in range(59)]


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A data section with its store below the test's folder."""

    def make(files: list[Path] | None = None, **changes: object) -> DataConfig:
        values = {"store": str(tmp_path / "store"), "sequence_length": 32, "holdout": 0.0}
        if files is not None:
            values["source"] = {"files": [str(file) for file in files]}
        return DataConfig.model_validate(values | changes)

    return make


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> list[Path]:
    """The documents as .txt files."""
    folder = tmp_path_factory.mktemp("texts")
    files = [folder / f"{i:03d}.txt" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())
    return files


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, text_files: list[Path]) -> Store:
    """A byte store of the documents, a fifth of them held out, in several shards."""
    folder = tmp_path_factory.mktemp("stores") / "store"
    pattern = str(text_files[0].parent / "*.txt")
    values = {"store": str(folder), "sequence_length": 32, "holdout": 0.2, "source": {"files": [pattern]}}
    return prepare(DataConfig.model_validate(values), say=quiet, shard_tokens=997)
