"""A run's batches, from the token stores onto the mesh."""

from collections.abc import Callable

from k3train.data.batch import Batch
from k3train.data.loader import Loader
from k3train.data.rows import plans_of
from k3train.data.stores import Stores
from k3train.train.assembly import Assembly


class Rows:
    """This process's share of every batch (``loader``), and the way to the whole batch (:meth:`to_mesh`).

    Args:
      parts: going on where the run does.
      stores: the tokens.
      say: told where a row plan cannot be kept.

    Raises:
      UserError: there is no row, or a batch does not divide over the devices.
    """

    def __init__(self, parts: Assembly, stores: Stores, say: Callable[[str], None]):
        self._course, data = parts.course, parts.exp.data
        self._feeds = {leg.shape: parts.feed(leg.rows, leg.length) for leg in self._course.legs}
        feed = self._feeds[self._course.legs[0].shape]
        plans = plans_of(stores, data.packing, data.sequence_length, say)
        self.loader = Loader(plans, data, self._course, data.shuffle_seed, feed.index, feed.count)

    def to_mesh(self, local: Batch, step: int) -> Batch:
        """The whole batch of the step that follows ``step`` steps, from this process's share of it."""
        return Batch(*map(self._feeds[self._course.leg(step).shape], local))
