import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.data.order import RowOrder, permute


@given(st.integers(1, 3000), st.integers(0, 2**63), st.integers(0, 2**40))
def test_permutation_is_a_bijection(size, seed, epoch):
    rows = permute(np.arange(size), size, seed, epoch)
    np.testing.assert_array_equal(np.sort(rows), np.arange(size))


def test_places_do_not_depend_on_each_other():
    whole = permute(np.arange(1000), 1000, 3, 4)
    assert [int(permute(np.array([i]), 1000, 3, 4)[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_large_domains_stay_inside():
    size = 2**45 + 12345
    places = np.arange(size - 5000, size)
    rows = permute(places, size, 0, 0)
    assert len(np.unique(rows)) == len(places)
    assert rows.min() >= 0 and rows.max() < size


def test_looks_shuffled_and_differs_by_seed_and_epoch():
    size = 10_000
    orders = [permute(np.arange(size), size, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1))]
    for rows in orders:
        # Correlation of place and row, and the share of neighbours that stay neighbours, are those of chance.
        assert abs(np.corrcoef(np.arange(size), rows)[0, 1]) < 0.05
        assert (np.abs(np.diff(rows)) == 1).mean() < 0.002
    for i, left in enumerate(orders):
        for right in orders[:i]:
            assert (left == right).mean() < 0.002


def test_order_is_fixed_for_good():
    assert permute(np.arange(10), 10, 0, 0).tolist() == [8, 7, 6, 1, 4, 9, 2, 0, 5, 3]


def test_epochs_cover_all_rows():
    order = RowOrder(rows=17, seed=5)
    epochs, rows = order.row_of(np.arange(17 * 3))
    assert epochs.tolist() == [0] * 17 + [1] * 17 + [2] * 17
    for epoch in range(3):
        assert sorted(rows[epochs == epoch].tolist()) == list(range(17))


def test_data_exhausted():
    order = RowOrder(rows=10, seed=0, max_epochs=2)
    order.row_of(np.array([19]))
    with pytest.raises(UserError, match=r"sample 20 .* 2 epoch\(s\) of 10 rows are 20 samples") as error:
        order.row_of(np.array([0, 20]))
    assert error.value.exit_code is ExitCode.DATA_EXHAUSTED
