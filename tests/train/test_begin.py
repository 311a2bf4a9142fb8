"""Whether sources go on where they were when a run goes on with another data section."""

import json

import pytest

from k3train.data.config import DataConfig
from k3train.train.begin import _mixture_goes_on

EVEN = {"tokens": 0, "weights": {"a": 0.5, "b": 0.5}}
AT = 32 * 40  # tokens of 40 rows


def section(*phases: dict, names: str = "ab") -> DataConfig:
    sources = {name: {"store": name} for name in names}
    values = {"sequence_length": 32, "sources": sources, "mixture": {"block": 10, "phases": list(phases)}}
    return DataConfig.model_validate(values)


@pytest.mark.parametrize(
    ("now", "samples", "goes_on"),
    [
        (section(EVEN), 10**6, True),
        (section({"tokens": 0, "weights": {"a": 1, "b": 1}}), 10**6, True),
        (section(EVEN, {"tokens": AT, "weights": {"a": 0.9, "b": 0.1}}), 40, True),
        (section(EVEN, {"tokens": AT, "weights": {"a": 0.9, "b": 0.1}}), 41, False),
        (section(EVEN, {"tokens": AT, "weights": {"a": 0.5, "b": 0.4, "c": 0.1}}, names="abc"), 40, True),
        (section({"tokens": 0, "weights": {"a": 0.9, "b": 0.1}}), 1, False),
        (section({"tokens": 0, "weights": {"a": 0.9, "b": 0.1}}), 0, True),
        (DataConfig(store="a", sequence_length=32), 1, False),
        (DataConfig(store="a", sequence_length=32), 0, True),
    ],
)
def test_sources_go_on_where_nothing_before_changed(now, samples, goes_on):
    before = json.loads(json.dumps(section(EVEN).model_dump(mode="json")))
    assert _mixture_goes_on(now, before, samples) is goes_on


def test_one_source_goes_on():
    one = DataConfig(store="a", sequence_length=32)
    before = one.model_dump(mode="json")
    assert _mixture_goes_on(one, before, 5)
    for key in ("sources", "mixture"):  # as an earlier version wrote it
        del before[key]
    assert _mixture_goes_on(one, before, 5)
