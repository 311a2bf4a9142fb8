"""Which row is sample k: a keyed permutation of the rows in each epoch, without state. Imports no JAX.

Documents lie shuffled in the store; here rows are permuted. The permutation is a balanced Feistel network over the next
power of four, and numbers that fall past the last row walk on along their cycle until they fall inside, which keeps it
a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from dataclasses import dataclass

import numpy as np

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode

_ROUNDS = 6
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class RowOrder:
    """Order of ``rows`` rows under ``seed``; pure functions of the global sample number."""

    rows: int
    seed: int
    max_epochs: int | None = None

    @property
    def samples(self) -> int | None:
        """Samples there are in all; None where the data may be read again and again."""
        return None if self.max_epochs is None else self.rows * self.max_epochs

    def row_of(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, row) of each global sample number, int64 [n] each.

        Raises:
          UserError: exit 20, a sample lies past ``max_epochs``.
        """
        samples = np.atleast_1d(np.asarray(samples, np.int64))
        if len(samples):
            self.check(int(samples.max()) + 1)
        epochs = samples // self.rows
        places = samples % self.rows
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            of_epoch = epochs == epoch
            rows[of_epoch] = permute(places[of_epoch], self.rows, self.seed, int(epoch))
        return epochs, rows

    def check(self, stop: int) -> None:
        """Raise UserError (exit 20) where samples up to ``stop`` are more than there are."""
        if self.samples is not None and stop > self.samples:
            raise UserError(
                f"the data is used up: sample {stop - 1} was asked for, and {self.max_epochs} epoch(s) of {self.rows} "
                f"rows are {self.samples} samples. Raise data.max_epochs, train fewer steps or prepare more text",
                ExitCode.DATA_EXHAUSTED,
            )


def permute(places: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The row at each place of the epoch: a bijection of 0..size-1, int64 [n], no state and no table."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    result = np.asarray(places, np.int64).astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], half, keys)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Finaliser of the SplitMix64 generator (Steele, Lea and Flood 2014), uint64 wrapping."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[int]:
    state = np.array([seed & _WORD], np.uint64)
    state = _mix(state + np.uint64(0x9E3779B97F4A7C15)) ^ np.array([epoch & _WORD], np.uint64)
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return [int(key) for key in _mix(_mix(state) + steps)]
