"""Processes that do not know the same."""

import pytest

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.run.agreement import refuse_difference

KNOWN = {"run": {"seed": 0, "dir": "/runs/a"}, "data": {"store": "/here"}, "versions": {"jax": "0.12"}}


def test_the_same_and_other_places_are_let_through():
    refuse_difference(1, KNOWN, KNOWN)
    refuse_difference(1, KNOWN, {**KNOWN, "data": {"store": "/there"}})


def test_what_differs_is_named():
    other = {**KNOWN, "run": {"seed": 7, "dir": "/runs/a"}, "versions": {"jax": "0.11"}}
    with pytest.raises(UserError, match="process 3 differs from process 0") as refused:
        refuse_difference(3, KNOWN, other)
    assert "run.seed: 0 there, 7 here" in str(refused.value) and 'versions.jax: "0.12" there' in str(refused.value)
    assert refused.value.exit_code == ExitCode.CONFIG
