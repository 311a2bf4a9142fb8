"""The row plan that a data section names. Imports no JAX."""

from collections.abc import Callable
from typing import Literal

from k3train.data.best_fit import BestFit
from k3train.data.pack import Chunks, RowPlan
from k3train.data.store import Store
from k3train.data.stores import Stores

Packing = Literal["concat", "best_fit"]


def plan_rows(
    store: Store, packing: Packing, sequence_length: int, say: Callable[[str], object] = lambda _: None
) -> RowPlan:
    """Rows of the training side.

    Args:
      store: an opened store.
      packing: see ``data.packing``.
      sequence_length: S.
      say: told where a plan cannot be kept.

    Raises:
      UserError: the store holds no row.
    """
    match packing:
        case "concat":
            return Chunks(store.train, sequence_length, store.pad_id)
        case "best_fit":
            return BestFit(store.train, sequence_length, store.pad_id, say)


def plans_of(
    stores: Stores, packing: Packing, sequence_length: int, say: Callable[[str], object] = lambda _: None
) -> dict[str, RowPlan]:
    """Rows of each source by name; otherwise like :func:`plan_rows`."""
    return {name: plan_rows(store, packing, sequence_length, say) for name, store in stores.by_name.items()}
