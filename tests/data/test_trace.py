"""From a sample back to its documents."""

import json
from pathlib import Path

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.data.course import Course
from k3train.data.header import ORIGIN_NAMES, ORIGINS
from k3train.data.loader import Loader
from k3train.data.order import RowOrder
from k3train.data.pack import Chunks
from k3train.data.prepare import prepare
from k3train.data.reading import Reading
from k3train.data.rows import plan_rows
from k3train.data.tokenizer import ByteTokenizer
from k3train.data.trace import Trace

from .conftest import quiet


@pytest.mark.parametrize("length", [1, 7, 32, 500])
def test_documents_equal_the_obvious_ones(store, length):
    """Token by token, for every row."""
    split = store.train
    document = np.repeat(np.arange(split.documents), np.diff(split.doc_offsets))
    plan = Chunks(split, length)
    for row in range(plan.rows):
        assert plan.documents(row) == tuple(dict.fromkeys(document[row * length : (row + 1) * length].tolist()))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_are_those_the_loader_reads(store, make_config, packing):
    loader = Loader(plan_rows(store, packing, 32), make_config(packing=packing), Course.steady(8, 32, 24), 11)
    rows, batch = loader.trace.rows(24 * 32, 8, 32), next(loader)
    loader.close()
    assert [row.sample for row in rows] == list(range(24, 32))
    for row, tokens, segments in zip(rows, batch.tokens, batch.segment_ids, strict=True):
        assert len(row.documents) == segments.max()
        for number, origin in zip(row.documents, row.origins, strict=True):
            file, _, line = origin.rpartition(":")
            assert line == "1" and text_of(store, number) == Path(file).read_text(encoding="utf-8")
        for segment, number in enumerate(row.documents, start=1):
            assert tokens[segments == segment].tobytes() in store.train.document(number).tobytes()


def text_of(store, number: int) -> str:
    return ByteTokenizer().decode(store.train.document(number))


def test_a_line_of_a_file_and_a_store_that_knows_no_origins(tmp_path, make_config):
    file = tmp_path / "a.jsonl"
    texts = [f"text {i} " * (i + 1) for i in range(9)]
    file.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    store = prepare(make_config([file]), say=quiet)
    found = {}
    for number in range(store.train.documents):
        origin = store.train.origin(number)
        assert origin is not None
        assert file.read_bytes()[origin.offset :].startswith(b'{"text"') and origin.file == str(file)
        found[origin.line] = text_of(store, number)
    assert [found[i + 1] for i in range(9)] == texts
    for name in (ORIGINS, ORIGIN_NAMES):
        (store.train.folder / name).unlink()
    assert store.train.origin(0) is None


def test_samples_past_the_end(store):
    with pytest.raises(UserError, match="used up"):
        Trace(Reading([Chunks(store.train, 32)], [RowOrder(5, 0, max_epochs=1)])).rows(4 * 32, 2, 32)
