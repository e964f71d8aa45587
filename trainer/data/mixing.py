"""Mix the rows of several sources by weight: the order is a pure function of step and seed.

The position of a row in the mixture determines its source by a periodic pattern, in which each source has its exact
share of every prefix to less than one row (Tijdeman, "The chairman assignment problem", 1980).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainer.data.order import Int64Array, permute_epochs, steps_for_rows
from trainer.data.packing import Arrays, ColumnSpecs, Dataset, RowIndices, check_rows

MAX_PERIOD = 1 << 16  # rows of the pattern; weights that need more are rounded


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A periodic pattern of sources.

    Attributes:
        pattern: [period] source of each position.
        ranks: [period] positions of the same source before each position in the pattern.
        counts: [sources] positions of each source in the pattern.
    """

    pattern: Int64Array
    ranks: Int64Array
    counts: Int64Array

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each position, and how many positions of that source are before it."""
        periods, phases = np.divmod(positions, len(self.pattern))
        sources = self.pattern[phases]
        return sources, periods * self.counts[sources] + self.ranks[phases]

    def rows_before(self, position: int) -> Int64Array:
        """Return how many of the positions before one are of each source, [sources]."""
        periods, phase = divmod(position, len(self.pattern))
        return periods * self.counts + np.bincount(self.pattern[:phase], minlength=len(self.counts))


def mix_by_weight(weights: Sequence[float]) -> Mixture:
    """Return a pattern in which each source has its share of the positions of every prefix to less than one.

    Args:
        weights: Positive weight of each source; they need not sum to 1.
    """
    counts = pattern_counts(weights)
    pattern = np.array(list(_assign_positions(counts)), np.int64)
    ranks = np.empty_like(pattern)
    for source, count in enumerate(counts):
        ranks[pattern == source] = np.arange(count)
    return Mixture(pattern, ranks, np.array(counts, np.int64))


def pattern_counts(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in proportion to weights.

    If their sum would exceed MAX_PERIOD, the shares are rounded to whole numbers with that sum, each at least 1.
    """
    exact = [Fraction(repr(weight)) for weight in weights]
    unit = Fraction(math.gcd(*(share.numerator for share in exact)), math.lcm(*(share.denominator for share in exact)))
    scaled = [share / unit for share in exact]
    divisor = math.gcd(*(int(share) for share in scaled))
    counts = [int(share) // divisor for share in scaled]
    total = sum(counts)
    return counts if total <= MAX_PERIOD else _round_counts([Fraction(count, total) for count in counts])


def _round_counts(shares: Sequence[Fraction]) -> list[int]:
    """Return whole numbers of sum MAX_PERIOD, at least 1, with the largest remainders rounded up."""
    free = MAX_PERIOD - len(shares)
    counts = [1 + math.floor(share * free) for share in shares]
    remainders = [share * free % 1 for share in shares]
    largest = sorted(range(len(shares)), key=lambda source: -remainders[source])
    for source in largest[: MAX_PERIOD - sum(counts)]:
        counts[source] += 1
    return counts


def _assign_positions(counts: Sequence[int]) -> list[int]:
    """Return the source of each position of one period, by Tijdeman's algorithm in whole numbers.

    Of the sources that are far enough behind their share, the next position goes to the one that would be too far
    behind first.
    """
    period, slack = sum(counts), max(2 * len(counts) - 2, 1)
    assigned = [0] * len(counts)
    sources = list[int]()
    for position in range(1, period + 1):
        behind = [slack * (count * position - period * done) for count, done in zip(counts, assigned)]
        candidates = [source for source, lag in enumerate(behind) if lag >= period]
        source = min(candidates, key=lambda i: _deadline(counts[i], assigned[i], period, slack))
        assigned[source] += 1
        sources.append(source)
    return sources


def _deadline(count: int, assigned: int, period: int, slack: int) -> int:
    """Return the first position at which a source without another row lags by more than 1 - 1 / slack rows."""
    return (slack - 1 + slack * assigned) * period // (slack * count) + 1


@dataclass(frozen=True, slots=True)
class MixedOrder:
    """Rows of each training step of several sources, each epoch after epoch of its own.

    Rows of a `ConcatenatedDataset` are numbered source after source.

    Attributes:
        source_rows: Rows of each source. Each of its epochs has every row once.
        mixture: Source of each position.
        batch_size: Rows of a step.
        seed: Seed of the permutations.
        shuffle: Permute the rows of each epoch of a source; otherwise they keep the order of the data.
    """

    source_rows: tuple[int, ...]
    mixture: Mixture
    batch_size: int
    seed: int
    shuffle: bool

    @property
    def n_rows(self) -> int:
        """Rows of all sources: the length of an epoch of the run."""
        return sum(self.source_rows)

    @property
    def steps_per_epoch(self) -> float:
        """Steps that take as many rows as all sources have."""
        return self.n_rows / self.batch_size

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """Return the rows of a step.

        Args:
            step: The step, from 0.
            start: First position in the batch.
            stop: End position in the batch; None for the whole batch.
        """
        stop = self.batch_size if stop is None else stop
        sources, indices = self.mixture.locate(step * self.batch_size + np.arange(start, stop, dtype=np.int64))
        rows = np.empty_like(indices)
        first_row = 0
        for source, n_rows in enumerate(self.source_rows):
            mask = sources == source
            seed = f"{self.seed} source {source}" if self.shuffle else None
            rows[mask] = first_row + permute_epochs(indices[mask], n_rows, seed)
            first_row += n_rows
        return rows

    def epochs(self, step: int) -> Int64Array:
        """Return the epoch of each row of a step in its source."""
        sources, indices = self.mixture.locate(step * self.batch_size + np.arange(self.batch_size, dtype=np.int64))
        return indices // np.array(self.source_rows, np.int64)[sources]

    def steps_for_epochs(self, epochs: float) -> int:
        """Return the number of steps that take `epochs` times the rows of all sources, at least 1."""
        return steps_for_rows(epochs, self.n_rows, self.batch_size)

    def source_counts(self, steps: int) -> list[int]:
        """Return the rows that the first steps take of each source."""
        return self.mixture.rows_before(steps * self.batch_size).tolist()


@dataclass(frozen=True, slots=True)
class ConcatenatedDataset:
    """The rows of several datasets, one after the other.

    Attributes:
        parts: The datasets by name of their source; all have the same columns.
    """

    parts: Mapping[str, Dataset]

    @property
    def first_row(self) -> int:
        """Index of the first row."""
        return 0

    @property
    def n_rows(self) -> int:
        """Number of rows of all datasets."""
        return sum(part.n_rows for part in self.parts.values())

    @property
    def seq_length(self) -> int:
        """Predicted tokens per row."""
        return next(iter(self.parts.values())).seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return next(iter(self.parts.values())).columns

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return the columns of rows, as `Dataset.get_batch` does."""
        indices = check_rows(rows, self.n_rows)
        batch = {name: np.zeros((len(indices), length), dtype) for name, (length, dtype) in self.columns.items()}
        bounds = itertools.pairwise(itertools.accumulate((part.n_rows for part in self.parts.values()), initial=0))
        for part, (first, end) in zip(self.parts.values(), bounds):
            mask = (indices >= first) & (indices < end)
            if mask.any():
                part_epochs = None if epochs is None else np.asarray(epochs)[mask]
                for name, array in part.get_batch(indices[mask] - first, part_epochs).items():
                    batch[name][mask] = array
        return batch
