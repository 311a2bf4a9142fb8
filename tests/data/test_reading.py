"""Several sources read as one: rows, epochs, caps, traces and held-out text."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.batch import Batch, batch_hash
from k3train.data.config import DataConfig, MixtureConfig
from k3train.data.course import Course
from k3train.data.holdout import holdout_batches, holdouts
from k3train.data.loader import Loader
from k3train.data.mixture import mix
from k3train.data.order import RowOrder
from k3train.data.pack import Chunks
from k3train.data.prepare import ensure_stores
from k3train.data.reading import Reading, reading_of
from k3train.data.rows import plans_of
from k3train.data.stores import Stores

from .conftest import quiet

B, SEED = 8, 11


def section(folder: Path, **changes) -> DataConfig:
    """Two sources below ``folder``."""
    sources = {
        name: {"store": str(folder / name), "source": {"files": [str(folder / f"{name}.jsonl")]}}
        for name in ("web", "code")
    }
    phases = [
        {"tokens": 0, "weights": {"web": 0.8, "code": 0.2}},
        {"tokens": 32 * 40, "weights": {"web": 1, "code": 1}},
    ]
    values = {"sources": sources, "sequence_length": 32, "holdout": 0.2, "mixture": {"block": 10, "phases": phases}}
    return DataConfig.model_validate(values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Stores and texts of two sources; every document says which it is of."""
    folder = tmp_path_factory.mktemp("sources")
    for name, documents in (("web", 40), ("code", 15)):
        lines = [json.dumps({"text": f"{name} {i} " * (1 + i % 9)}) for i in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    ensure_stores(section(folder), say=quiet)
    return folder


@pytest.fixture(scope="module")
def stores(folder) -> Stores:
    return ensure_stores(section(folder), say=quiet)


@pytest.fixture(params=["concat", "best_fit"])
def config(folder, request) -> DataConfig:
    return section(folder, packing=request.param)


def plans(stores: Stores, config: DataConfig):
    return plans_of(stores, config.packing, config.sequence_length)


def take(count: int, stores: Stores, config: DataConfig, rows: int = B, start: int = 0, **options) -> list[Batch]:
    course = Course.steady(rows, config.sequence_length, start)
    loader = Loader(plans(stores, config), config, course, SEED, **options)
    batches = [next(loader) for _ in range(count)]
    loader.close()
    return batches


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def test_batches_depend_on_neither_start_nor_processes_nor_batch_size(stores, config):
    """Across the border of a block and of a phase (at sample 40)."""
    whole = take(12, stores, config)
    assert len({batch_hash(batch) for batch in whole}) == 12
    rows = joined(whole)
    for start in (8, 35, 40, 57):
        later = joined(take(4, stores, config, start=start))
        for a, b in zip(later, rows, strict=True):
            np.testing.assert_array_equal(a, b[start : start + 32])
    parts = [take(12, stores, config, part=p, parts=4) for p in range(4)]
    assert [batch_hash(joined(list(shares))) for shares in zip(*parts, strict=True)] == list(map(batch_hash, whole))
    for a, b in zip(joined(take(32, stores, config, rows=3)), rows, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_are_those_of_the_source_that_the_trace_names(stores, config):
    loader = Loader(plans(stores, config), config, Course.steady(B, 32, 32), SEED)
    traces, batch = loader.trace.rows(32 * 32, B, 32), next(loader)
    loader.close()
    assert {row.source for row in traces} == {"web", "code"}
    for row, tokens, segments in zip(traces, batch.tokens, batch.segment_ids, strict=True):
        split = stores.by_name[row.source].train
        assert len(row.documents) == segments.max() == len(row.origins)
        assert all(f"{row.source}.jsonl:" in origin for origin in row.origins)
        for segment, number in enumerate(row.documents, start=1):
            assert tokens[segments == segment].tobytes() in split.document(number).tobytes()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 20), st.integers(0, 9))
def test_every_epoch_of_a_source_has_each_row_once(web, code, weight, seed):
    phase = {"tokens": 0, "weights": {"web": weight, "code": 1}}
    mixture = mix(MixtureConfig.model_validate({"block": 30, "phases": [phase]}), ["code", "web"], 32, seed)
    reading = Reading([], [RowOrder(code, seed), RowOrder(web, seed + 1)], mixture)
    sources, epochs, rows = reading.where(np.arange(600))
    for source, size in enumerate((code, web)):
        own, count = sources == source, int((sources == source).sum())
        for epoch in range(count // size):
            # 600 samples are whole blocks, so no row with a smaller number is still to come.
            found = rows[own & (epochs == epoch)]
            assert sorted(found.tolist()) == list(range(size))
        assert epochs[own].max() == (count - 1) // size
    for use in reading.usage(600):
        assert use.read == int((sources == mixture.names.index(use.name)).sum()) and use.epochs == use.read / use.rows


def test_names_decide_and_not_their_order_in_the_file(stores, folder):
    one = section(folder)
    turned = section(folder, sources=dict(reversed(one.model_dump(mode="json")["sources"].items())))
    assert batch_hash(take(1, stores, one)[0]) == batch_hash(take(1, stores, turned)[0])
    assert one == turned


def test_sources_that_are_alike_are_not_read_in_step(stores, folder):
    plan = Chunks(stores.by_name["web"].train, 32)
    orders = reading_of({"web": plan, "code": plan}, section(folder), 0).orders
    assert orders[0].row_of(np.arange(plan.rows))[1].tolist() != orders[1].row_of(np.arange(plan.rows))[1].tolist()


def test_a_source_that_is_used_up(stores, folder):
    config = section(folder)
    limited = config.model_dump(mode="json")["sources"]
    limited["code"]["max_epochs"] = 2
    config = section(folder, sources=limited)
    reading = reading_of(plans(stores, config), config, SEED)
    code = reading.orders[0]
    end = reading.samples
    assert end is not None
    sources, epochs, _ = reading.where(np.arange(end))
    assert (sources == 0).sum() >= 2 * code.rows - 5 and epochs[sources == 0].max() == 1
    with pytest.raises(UserError, match=r"source code is used up: .* Raise data.sources.code.max_epochs") as error:
        reading.where(np.array([end]))
    assert error.value.exit_code is ExitCode.DATA_EXHAUSTED
    loader = Loader(plans(stores, config), config, Course.steady(B, 32), SEED)
    for _ in range(end // B):
        next(loader)
    with pytest.raises(UserError, match="source code is used up"):
        next(loader)
    loader.close()


def test_a_source_smaller_than_a_batch(stores, folder):
    """Its rows come again within the batch, each epoch whole; with a cap they end the run before the batch."""
    config = section(folder)
    rows = {name: plan.rows for name, plan in plans(stores, config).items()}
    size = 10 * rows["code"]  # two batches hold each row of it twice and more
    loader = Loader(plans(stores, config), config, Course.steady(size, 32), SEED)
    next(loader)
    sources, epochs, numbers = loader.reading.where(np.arange(size))
    loader.close()
    code = sources == list(loader.reading.names).index("code")
    assert rows["code"] < code.sum() < size
    assert sorted(numbers[code & (epochs == 0)].tolist()) == list(range(rows["code"]))
    whole, halves = take(2, stores, config, size), take(4, stores, config, size // 2)
    assert batch_hash(joined(whole)) == batch_hash(joined(halves))
    sources = {name: dict(source) for name, source in section(folder).sources.items()}
    capped = section(folder, sources=sources | {"code": sources["code"] | {"max_epochs": 1}})
    with pytest.raises(UserError, match="source code is used up") as error:
        take(1, stores, capped, size)
    assert error.value.exit_code is ExitCode.DATA_EXHAUSTED


def test_held_out_text_of_all_sources(stores):
    both = holdouts(stores, 32, 4)
    alone = [holdout_batches(store, 32, 4) for store in stores.by_name.values()]
    assert both.supervised == sum(part.supervised for part in alone) == sum(int(b.loss_mask.sum()) for b in both)
    assert both.source_bytes == sum(part.source_bytes for part in alone) and len(both) == len(list(both))
    few = holdouts(stores, 32, 4, max_rows=1)
    assert len(few) == 2


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data.sources.code: data.source.files: no file matches"):
        ensure_stores(section(tmp_path), say=quiet)


TWO = {"web": {"store": "w"}, "code": {"store": "c"}}
MIXTURE = {"phases": [{"tokens": 0, "weights": {"web": 0.5, "code": 0.5}}]}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "data.store: required, or data.sources with data.mixture"),
        ({"store": "s", "mixture": MIXTURE}, "data.mixture mixes data.sources, and there are none"),
        ({"store": "s", "sources": TWO, "mixture": MIXTURE}, "data.store is for one source"),
        ({"source": {"files": ["a"]}, "sources": TWO, "mixture": MIXTURE}, "data.source is for one source"),
        ({"max_epochs": 1, "sources": TWO, "mixture": MIXTURE}, "data.max_epochs is for one source"),
        ({"sources": TWO}, "data.mixture: required with data.sources"),
        ({"sources": {**TWO, "a.b": {"store": "x"}}, "mixture": MIXTURE}, "'a.b' is no name"),
        ({"sources": {**TWO, "code": {"store": "w/"}}, "mixture": MIXTURE}, "two sources have one store"),
        ({"sources": {**TWO, "more": {"store": "m"}}, "mixture": MIXTURE}, "sources more: no phase"),
        ({"sources": {"web": {"store": "w"}}, "mixture": MIXTURE}, "no source code; data.sources has web"),
    ],
)
def test_refused(values, says):
    with pytest.raises(ValueError, match=says):
        DataConfig.model_validate({"sequence_length": 32} | values)
