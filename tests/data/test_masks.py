"""Masks of the loss: from the fields of a record, through the store, into the rows."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from rich.console import Console

from k3train.config.errors import UserError
from k3train.data.config import DataConfig
from k3train.data.course import Course
from k3train.data.dedup import dedup
from k3train.data.holdout import holdout_batches
from k3train.data.loader import Loader
from k3train.data.match import difference
from k3train.data.ngram import evaluate_ngram
from k3train.data.prepare import prepare
from k3train.data.report import show_rows
from k3train.data.rows import plan_rows
from k3train.data.stats import store_stats
from k3train.data.stats_report import print_stats
from k3train.data.store import Split, open_store
from k3train.data.stores import Stores
from k3train.data.tokenizer import ByteTokenizer

from .conftest import quiet

FIELDS = {"prompt_field": "ask", "masked_field": "mask"}


def records(count: int = 60) -> list[dict]:
    """Questions and answers with letters of two bytes; some with a mask, some without a prompt."""
    random, found = np.random.default_rng(3), []
    for i in range(count):
        answer = f"{i}: " + "aé" * int(random.integers(3, 60))
        mask = [[0, 2], [5, int(random.integers(6, len(answer)))]] if i % 3 == 0 else None
        found.append({"ask": f"wé{i}?" * (i % 4), "text": answer, "mask": mask, "id": i})
    return found


def wanted(record: dict) -> list[tuple[int, bool]]:
    """(byte, whether it is masked) of each byte of the text, character by character."""
    characters = [(c, True) for c in record["ask"]]
    for i, c in enumerate(record["text"]):
        characters.append((c, any(start <= i < stop for start, stop in record["mask"] or ())))
    return [(byte, hidden) for c, hidden in characters for byte in c.encode()]


def stored(split: Split, number: int) -> list[tuple[int, bool]]:
    """The same of a document of a store, without BOS and EOS, which are not masked."""
    start, stop = split.doc_offsets[number : number + 2].tolist()
    hidden = np.zeros(stop - start, bool)
    split.mask(start, stop, hidden)
    assert not hidden[0] and not hidden[-1]
    return list(zip(split.read(start, stop).tolist(), hidden.tolist(), strict=True))[1:-1]


@pytest.fixture
def write(tmp_path, make_config):
    def write(kind: str = "jsonl", lines: list[dict] | None = None, **changes) -> DataConfig:
        lines = records() if lines is None else lines
        if kind == "jsonl":
            (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        else:
            pq.write_table(pa.Table.from_pylist(lines), tmp_path / "a.parquet", row_group_size=7)
        source = {"files": [str(tmp_path / f"a.{kind}")], "metadata_fields": ["id"]} | FIELDS
        values = {"store": str(tmp_path / kind), "holdout": 0.3, "source": source}
        return make_config(**(values | changes))

    return write


@pytest.mark.parametrize(("kind", "workers"), [("jsonl", 1), ("jsonl", 2), ("parquet", 1)])
def test_the_store_keeps_them(write, kind, workers):
    config = write(kind)
    source = config.source.model_copy(update={"workers": workers})
    store = prepare(config.model_copy(update={"source": source}), say=quiet, piece_bytes=900, shard_tokens=501)
    lines, found = records(), 0
    for split in (store.train, store.holdout):
        for number in range(split.documents):
            line = lines[split.metadata(number)["id"]]
            assert stored(split, number) == wanted(line)
            found += 1
    assert found == len(lines) and min(len(store.train.masked), len(store.holdout.masked)) > 0
    store.verify()
    opened = open_store(store.path)
    difference(opened, config, ByteTokenizer())
    other = config.model_copy(update={"source": config.source.model_copy(update={"masked_field": None})})
    with pytest.raises(UserError, match=r"data.source.masked_field: the store has mask, the config says None"):
        difference(opened, other, ByteTokenizer())


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_leave_them_out_of_the_loss(write, packing):
    """The model reads them, they are targets in name (an extra prediction reads them too), and they weigh nothing."""
    config = write(packing=packing)
    store = prepare(config, say=quiet)
    plain = open_store(store.path)
    plain.train.__dict__["masked"] = np.zeros((0, 2), np.int64)
    plan, bare = (plan_rows(s, packing, 32) for s in (store, plain))
    batch, unmasked = plan.cut(np.arange(plan.rows)), bare.cut(np.arange(plan.rows))
    for name in ("tokens", "targets", "segment_ids"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(unmasked, name))
    hidden = np.zeros(store.train.tokens, bool)
    for start, stop in store.train.masked.tolist():
        hidden[start:stop] = True
    for row in range(plan.rows):
        places = np.concatenate([np.arange(start, stop) for start, stop in plan.stretches(row)])
        want = unmasked.loss_mask[row].copy()
        want[: len(places) - 1] &= ~hidden[places[1:]]
        np.testing.assert_array_equal(batch.loss_mask[row], want)
    assert 0 < batch.loss_mask.sum() < unmasked.loss_mask.sum()


def test_batches_do_not_depend_on_the_processes(write):
    config = write()
    store = prepare(config, say=quiet)
    plan = plan_rows(store, "best_fit", 32)
    course = Course.steady(8, 32)
    loaders = [Loader(plan, config, course, 5, part, parts) for part, parts in ((0, 1), (0, 2), (1, 2))]
    for _ in range(5):
        whole, *halves = (next(loader) for loader in loaders)
        for name in whole._fields:
            joined = np.concatenate([getattr(half, name) for half in halves])
            np.testing.assert_array_equal(joined, getattr(whole, name))
    for loader in loaders:
        loader.close()


def test_held_out_text_is_scored_without_them(write):
    store = prepare(write(), say=quiet)
    lines, bytes_, targets = records(), 0, 0
    for number in range(store.holdout.documents):
        scored = [not hidden for _, hidden in wanted(lines[store.holdout.metadata(number)["id"]])]
        bytes_, targets = bytes_ + sum(scored), targets + sum(scored) + 1  # and EOS
    holdout = holdout_batches(store, 32, 4)
    assert (holdout.source_bytes, holdout.supervised) == (bytes_, targets)
    assert sum(int(batch.loss_mask.sum()) for batch in holdout) == targets
    with pytest.raises(UserError, match=r"masks leave out targets .* not comparable"):
        evaluate_ngram(store, ByteTokenizer(), 3)


def test_people_see_them(write, make_config):
    config = write(lines=[{"ask": "why? ", "text": "so it is", "mask": [[3, 5]], "id": 0}] * 5, holdout=0.0)
    store = prepare(config, say=quiet)
    out = Console(width=200, record=True, color_system=None, file=io.StringIO())
    stores = Stores({"": store})
    show_rows(stores, ByteTokenizer(), out, make_config(sequence_length=15), rows=1, sample=0, holdout=False)
    stats = store_stats(store, 15)
    print_stats(stats, out)
    text = out.export_text()
    assert stats.train.masked_tokens == 5 * 7 and "35 (46.7%)" in text
    assert "masked" in text and "⟦" in text


def test_duplicates_are_told_by_prompt_and_text(write, tmp_path):
    lines = [
        {"ask": ask, "text": "so it is, and " * 9, "mask": None, "id": i} for i, ask in enumerate(("a?", "b?", "a?"))
    ]
    config, out = write(lines=lines, holdout=0.0), tmp_path / "list.jsonl"
    found = dedup(config, out, say=quiet, threshold=1.0)
    assert (found.documents, found.exact, found.near) == (3, 1, 0)
    source = config.source.model_copy(update={"duplicates": str(out)})
    assert prepare(config.model_copy(update={"source": source}), say=quiet).train.documents == 2
    other = source.model_copy(update={"prompt_field": None})
    with pytest.raises(UserError, match=r"list.jsonl: made of other sources"):
        prepare(config.model_copy(update={"source": other, "store": str(tmp_path / "other")}), say=quiet)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mask": [[3, 2]]}, "broken mask: 'mask' is no rising list of .start, stop. within 8 characters"),
        ({"mask": [[0, 9]]}, "broken mask"),
        ({"mask": [[0, 4], [3, 5]]}, "broken mask"),
        ({"mask": [[-1, 4]]}, "broken mask"),
        ({"mask": [[0, True]]}, "broken mask"),
        ({"mask": "0-4"}, "broken mask"),
        ({"mask": [[0, 8]]}, "all masked: no character is a target of the loss"),
        ({"mask": [[0, 3], [3, 8]]}, "all masked"),
        ({"ask": 7}, "field is not text: 'ask' is a number"),
        ({"ask": None}, "field is not text: 'ask' is null"),
        ({"ask": "\ud800"}, "invalid Unicode: a lone surrogate in 'ask'"),
    ],
)
def test_bad_masks(write, change, says):
    config = write(lines=[{"ask": "why? ", "text": "so it is", "mask": None, "id": 0} | change])
    with pytest.raises(UserError, match=rf"a.jsonl: line 1, byte 0: {says}"):
        prepare(config, say=quiet)


def test_a_missing_field_is_named(write, tmp_path, make_config):
    with pytest.raises(UserError, match="missing field: no 'mask'; it has 'ask', 'text'"):
        prepare(write(lines=[{"ask": "why? ", "text": "so"}]), say=quiet)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UserError, match=r"b.txt: line 1, byte 0: missing field: no 'ask'; it has none"):
        prepare(make_config(source={"files": [str(tmp_path / "b.txt")], "prompt_field": "ask"}), say=quiet)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": {"corpus": "django-5.2.8", "prompt_field": "ask"}}, "source.prompt_field names a field"),
        (
            {"source": {"files": ["a.bin"], "kind": "megatron", "masked_field": "m"}},
            "source.masked_field names a field",
        ),
        ({"source": {"files": ["a.jsonl"], **FIELDS}, "fill_in_middle": {}}, "leave one of the two out"),
    ],
)
def test_what_does_not_go_together(make_config, changes, says):
    with pytest.raises(ValidationError, match=says):
        make_config(**changes)
