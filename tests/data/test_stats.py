import json

import numpy as np
from rich.console import Console

from k3train.data.batch import Batch
from k3train.data.pack import Chunks
from k3train.data.prepare import prepare
from k3train.data.report import _masked, _row_text, show_rows
from k3train.data.rows import plan_rows
from k3train.data.stats import histogram, store_stats
from k3train.data.stats_report import bar, print_stats
from k3train.data.stores import Stores
from k3train.data.tokenizer import ByteTokenizer

from .conftest import quiet


def recorded(width: int = 160) -> Console:
    return Console(width=width, record=True, color_system=None, highlight=False, markup=False)


def test_histogram_counts_every_document_once():
    lengths = np.array([1, 2, 3, 4, 7, 8, 1023, 1024, 1024])
    bins = histogram(lengths)
    assert [(b.first, b.last) for b in bins] == [(1 << i, (2 << i) - 1) for i in range(11)]
    assert [b.documents for b in bins] == [1, 2, 2, 1, 0, 0, 0, 0, 0, 1, 2]
    assert [b.tokens for b in bins] == [1, 5, 11, 8, 0, 0, 0, 0, 0, 1023, 2048]
    assert histogram(np.zeros(0, np.int64)) == []


def test_figures_agree_with_the_documents(store, texts):
    stats = store_stats(store, 100, longest=3)
    lengths = np.array([len(store.train.document(i)) for i in range(store.train.documents)])
    train = stats.train
    assert (train.documents, train.tokens) == (len(lengths), lengths.sum())
    assert sum(b.documents for b in train.histogram) == len(lengths)
    assert sum(b.tokens for b in train.histogram) == lengths.sum()
    assert (train.longer_documents, train.longer_tokens) == ((lengths > 100).sum(), lengths[lengths > 100].sum())
    assert train.source_bytes is not None
    assert train.source_bytes + (stats.holdout.source_bytes or 0) == sum(len(text.encode()) for text in texts)
    assert train.tokens_per_byte == train.tokens / train.source_bytes
    assert [found.tokens for found in train.longest] == sorted(lengths.tolist(), reverse=True)[:3]
    number = train.longest[0].document
    assert train.longest[0].origin == f"{store.train.origin(number).file}:1"
    assert (lengths <= train.quantiles["0.5"]).mean() >= 0.5 > (lengths < train.quantiles["0.5"]).mean()
    assert json.loads(json.dumps(stats.as_json()))["train"]["histogram"][0]["documents"] == train.histogram[0].documents


def test_rows_of_each_packing_are_those_that_training_reads(store):
    for packed in store_stats(store, 32).rows:
        plan = plan_rows(store, packed.packing, 32)
        segments = plan.cut(np.arange(plan.rows)).segment_ids
        assert packed.rows == plan.rows
        assert packed.padding_tokens == int((segments == 0).sum())


def test_a_look_leaves_nothing_behind(text_files, make_config):
    store = prepare(make_config(text_files), say=quiet)
    store_stats(store, 32)
    assert not (store.path / "plans").exists()


def test_a_store_of_less_than_a_row(store):
    stats = store_stats(store, 10**6)
    assert [(packed.rows, packed.left_out_tokens) for packed in stats.rows] == [(0, store.train.tokens)] * 2
    out = recorded()
    print_stats(stats, out)
    assert out.export_text().count("none: too little text") == 2


def test_printed_stats(store):
    out = recorded()
    print_stats(store_stats(store, 100), out)
    text = out.export_text()
    assert text.count("◄ a row") == 2 and "█" in text and "60 records read, 0 duplicates left out, 0 skipped" in text
    assert [bar(share, 2) for share in (0, 0.001, 0.5, 1)] == ["", "▏", "█", "██"]


def test_inspect_lists_origin_part_and_metadata(tmp_path, make_config):
    lines = [{"text": f"{i} " * 40, "url": f"site/{i}\x1b[2J"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = {"files": [str(tmp_path / "a.jsonl")], "metadata_fields": ["url"]}
    config = make_config(source=source)
    store = prepare(config, say=quiet)
    for packing in ("concat", "best_fit"):
        out = recorded()
        shown = config.model_copy(update={"sequence_length": 50, "packing": packing})
        show_rows(Stores({"": store}), ByteTokenizer(), out, shown, rows=3, sample=0, holdout=False)
        text = out.export_text()
        assert '{"url": "site/' in text and "\x1b" not in text and "■ 1 " in text
        plan = plan_rows(store, packing, 50)
        assert sum(len(plan.documents(row)) for row in range(plan.rows)) >= store.train.documents
        assert text.count("■ ") == text.count("┄ next document ┄") + 3
        assert "a.jsonl:" in text and " of 8" in text


def test_masked_tokens_are_marked(store):
    batch = Chunks(store.train, 24).cut(np.array([0]))
    assert not _masked(batch).any()
    mask = batch.loss_mask.copy()
    mask[0, 3:7] = False
    batch = Batch(batch.tokens, batch.targets, batch.segment_ids, mask)
    inside = batch.segment_ids[0, 1:] == batch.segment_ids[0, :-1]
    assert np.flatnonzero(_masked(batch)).tolist() == [i + 1 for i in range(3, 7) if inside[i]]
    text = _row_text(batch, store, ByteTokenizer(), marks=True).plain
    assert text.count("⟦") == text.count("⟧") >= 1
    assert "⟦" not in _row_text(batch, store, ByteTokenizer(), marks=False).plain
