"""Which source has global sample k: whole rows in stable blocks, without state and without a table. Imports no JAX.

Every block of B samples has the same number of rows of each source (largest remainder of the weights), and a keyed
permutation says where in the block they stand. So which row of which source sample k is follows from k by a division,
a search among the phases and one permutation, whatever was read before (the idea of Levanter's stable mixture, Hall et
al. 2024).
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from k3train.data.config import DataConfig, MixtureConfig
from k3train.data.order import permute


@dataclass(frozen=True, eq=False)
class Mixture:
    """Rows of several sources, in blocks of ``block`` samples; pure functions of the global sample number."""

    names: tuple[str, ...]
    """The sources, n of them."""
    block: int
    """B."""
    firsts: np.ndarray
    """int64 [phases], first block of each phase (or stretch of one, ``shares.Blocks``); the first is 0."""
    counts: np.ndarray
    """int64 [phases, n], rows of each source in each block of a phase; each sums to B."""
    seed: int
    """Key of the places within a block."""

    @cached_property
    def _before(self) -> np.ndarray:
        """int64 [phases, n], rows of each source before a phase."""
        lengths = np.diff(self.firsts)[:, None] * self.counts[:-1]
        return np.concatenate([np.zeros_like(self.counts[:1]), np.cumsum(lengths, axis=0)])

    @cached_property
    def _ends(self) -> np.ndarray:
        """int64 [phases, n], where each source's places end in the block before it is permuted."""
        return np.cumsum(self.counts, axis=1)

    def where(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number among that source's rows since the beginning) of global samples, int64 [len] each."""
        samples = np.atleast_1d(np.asarray(samples, np.int64))
        blocks, places = np.divmod(samples, self.block)
        sources, numbers = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks):
            chosen = blocks == block
            found = permute(places[chosen], self.block, self.seed, int(block))
            phase = int(np.searchsorted(self.firsts, block, side="right")) - 1
            source = np.searchsorted(self._ends[phase], found, side="right")
            counts = self.counts[phase][source]
            sources[chosen] = source
            inside = found - (self._ends[phase][source] - counts)
            numbers[chosen] = self._before[phase][source] + (block - self.firsts[phase]) * counts + inside
        return sources, numbers

    def read(self, samples: int) -> np.ndarray:
        """Rows of each source among the first ``samples`` samples, int64 [n]."""
        block, rest = divmod(samples, self.block)
        phase = int(np.searchsorted(self.firsts, block, side="right")) - 1
        whole = self._before[phase] + (block - self.firsts[phase]) * self.counts[phase]
        begun, _ = self.where(np.arange(samples - rest, samples, dtype=np.int64))
        return whole + np.bincount(begun, minlength=len(self.names))

    def sample_of(self, source: int, number: int) -> int | None:
        """The global sample that is row ``number`` (since the beginning) of a source; None where it never comes."""
        last = len(self.firsts) - 1
        for phase in range(last + 1):
            count, before = int(self.counts[phase, source]), int(self._before[phase, source])
            if count and (phase == last or number < self._before[phase + 1, source]):
                blocks, inside = divmod(number - before, count)
                block = int(self.firsts[phase]) + blocks
                places = permute(np.arange(self.block), self.block, self.seed, block)
                wanted = int(self._ends[phase, source]) - count + inside
                return block * self.block + int(np.flatnonzero(places == wanted)[0])
        return None

    def agrees(self, other: "Mixture", samples: int) -> bool:
        """Whether the first ``samples`` samples are the same rows of the same sources in ``other``."""
        return self.block == other.block and self._history(samples) == other._history(samples)

    def _history(self, samples: int) -> list[tuple[int, dict[str, int]]]:
        counts = (dict(zip(self.names, row, strict=True)) for row in self.counts.tolist())
        phases: list[tuple[int, dict[str, int]]] = []
        for first, row in zip(self.firsts.tolist(), counts, strict=True):
            present = {name: count for name, count in row.items() if count}
            # A phase with the weights of the one before is no new one.
            if first * self.block < samples and not (phases and phases[-1][1] == present):
                phases.append((first, present))
        return phases


def mixture_of(config: DataConfig, seed: int, rows: Mapping[str, int] | None = None) -> Mixture | None:
    """The mixture of a data section; None where there is one source.

    Args:
      seed: of the run's data.
      rows: of each source; without them no source is ever used up.

    Raises:
      ValueError: see :func:`mix`; a section that was validated, and not changed since, raises none.
    """
    if config.mixture is None or config.sources is None:
        return None
    epochs = {name: source.max_epochs for name, source in config.sources.items()}
    most = {name: limit and limit * rows[name] for name, limit in epochs.items()} if rows else None
    return mix(config.mixture, config.sources, config.sequence_length, seed, most)


def mix(
    config: MixtureConfig,
    names: Iterable[str],
    sequence_length: int,
    seed: int,
    most: Mapping[str, int | None] | None = None,
) -> Mixture:
    """The mixture of sources; their order does not matter.

    Args:
      most: rows that may be read of each, which matters where ``config.used_up`` is ``reweight``.

    Raises:
      ValueError: see ``shares.blocks``.
    """
    plan = config.blocks(names, sequence_length, most)
    firsts, counts = np.array(plan.firsts, np.int64), np.array(plan.counts, np.int64)
    return Mixture(plan.names, config.block, firsts, counts, derived_seed(seed, "blocks"))


def derived_seed(seed: int, purpose: str) -> int:
    """A seed of 63 bits that follows from another one and from what it is for."""
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose}".encode()).digest()[:8], "little") >> 1
