"""The table of metrics and its page."""

import json

from k3train.metrics.names import METRICS, find, page


def test_the_page_equals_the_table(root):
    assert (root / "docs" / "metrics.md").read_text() == page()


def test_names_are_unique_and_findable():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert find("train/lr/muon").name == "train/lr/<group>"
    assert find("eval/holdout/bpb").unit == "bits/byte"
    assert find("moe/maxvio_worst").name == "moe/maxvio"
    assert find("train/loss_worst") is None and find("train/lr") is None and find("train/lr/") is None
    assert not any("|" in text for metric in METRICS for text in metric)
    json.dumps(METRICS)
