"""The order of training rows: a pure function of step and seed.

A resumed run needs no iterator state. The module needs neither recipe nor trainer. Three parts
build on each other:

1. `permute` is a pseudorandom permutation of n numbers, computed for any index without a table.
2. `Mixture` assigns the positions of all steps to several sources by weight. After any number of rows, each source has
   had its share of them, up to less than one row (Tijdeman, "The chairman assignment problem", 1980).
3. `RowOrder` numbers the rows of all steps consecutively, and permutes each epoch of the data or of a source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import xxhash

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
# Four rounds suffice in theory (Luby and Rackoff, 1988). More rounds make up for the weak round
# function. The number is part of the order of every run: it must not change.
FEISTEL_ROUNDS = 8
# Positions of the pattern of a mixture. Weights that need more are rounded.
MAX_PERIOD = 1 << 16
# Largest denominator of a number of epochs: 0.6666666666666667 is read as two thirds.
MAX_DENOMINATOR = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """A periodic pattern of sources."""

    pattern: Int64Array  # [period] source of each position
    ranks: Int64Array  # [period] positions of the same source before each position in the pattern
    counts: Int64Array  # [sources] positions of each source in the pattern

    def locate(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each position, and the number of its earlier positions."""
        # E.g. pattern [0, 1, 0], ranks [0, 0, 1] and counts [2, 1]: position 5 is phase 2 of period 1,
        # so it is of source 0, after 1 * 2 + 1 = 3 earlier positions (0, 2 and 3).
        periods, phases = np.divmod(positions, len(self.pattern))
        sources = self.pattern[phases]
        return sources, periods * self.counts[sources] + self.ranks[phases]

    def rows_before(self, position: int) -> Int64Array:
        """Return the number of positions of each source before `position`, [sources]."""
        periods, phase = divmod(position, len(self.pattern))
        return periods * self.counts + np.bincount(self.pattern[:phase], minlength=len(self.counts))


def mix_by_weight(weights: Sequence[float]) -> Mixture:
    """Return a pattern of sources. After any number of positions, each source has its share, up to less than one.

    E.g. weights [2, 1] -> pattern [0, 1, 0]: after n positions, source 0 has 2n/3 positions,
    rounded up or down.

    Args:
        weights: Positive weight of each source. They need not sum to 1.
    """
    counts = pattern_counts(weights)
    pattern = np.array(list(_assign_positions(counts)), np.int64)
    ranks = np.empty_like(pattern)
    for source, count in enumerate(counts):
        ranks[pattern == source] = np.arange(count)
    return Mixture(pattern, ranks, np.array(counts, np.int64))


def pattern_counts(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in proportion to weights.

    If their sum would exceed MAX_PERIOD, the shares are rounded to whole numbers with that sum,
    each at least 1.
    """
    # `repr` gives the decimal that the user wrote: 0.1 is 1/10, not 3602879701896397/2^55.
    exact = [Fraction(repr(weight)) for weight in weights]
    # The largest unit that divides all weights. E.g. weights [1/2, 1/3] have the unit 1/6 and the
    # counts [3, 2].
    unit = Fraction(
        math.gcd(*(share.numerator for share in exact)),
        math.lcm(*(share.denominator for share in exact)),
    )
    scaled = [share / unit for share in exact]
    divisor = math.gcd(*(int(share) for share in scaled))
    counts = [int(share) // divisor for share in scaled]
    total = sum(counts)
    if total <= MAX_PERIOD:
        return counts
    return _round_counts([Fraction(count, total) for count in counts])


def _round_counts(shares: Sequence[Fraction]) -> list[int]:
    """Round shares to whole numbers of at least 1 with the sum MAX_PERIOD. The largest remainders are rounded up."""
    # One position of each source is set aside, so that no source disappears.
    free = MAX_PERIOD - len(shares)
    counts = [1 + math.floor(share * free) for share in shares]
    remainders = [share * free % 1 for share in shares]
    largest = sorted(range(len(shares)), key=lambda source: -remainders[source])
    for source in largest[: MAX_PERIOD - sum(counts)]:
        counts[source] += 1
    return counts


def _assign_positions(counts: Sequence[int]) -> list[int]:
    """Return the source of each position of one period, by Tijdeman's algorithm in whole numbers."""
    # Theorem of Tijdeman: for m sources, positions can be assigned so that each source deviates
    # from its share by at most 1 - 1 / (2m - 2) in every prefix. All comparisons are multiplied by
    # `period` and `slack`, so that they are between whole numbers.
    period = sum(counts)
    slack = max(2 * len(counts) - 2, 1)
    assigned = [0] * len(counts)
    sources = list[int]()
    for position in range(1, period + 1):
        # Among the sources far enough behind their share, the one with the earliest deadline gets the
        # position. A source may get it only if it would not be too far ahead after it:
        # count * position / period - done >= 1 / slack.
        behind = [
            slack * (count * position - period * done) for count, done in zip(counts, assigned)
        ]
        candidates = [source for source, lag in enumerate(behind) if lag >= period]
        # The first position at which a source lags by more than 1 - 1 / slack rows: the smallest
        # whole t with count * t / period - assigned > 1 - 1 / slack.
        deadlines = {
            source: (slack - 1 + slack * assigned[source]) * period // (slack * counts[source])
            for source in candidates
        }
        source = min(candidates, key=deadlines.__getitem__)
        assigned[source] += 1
        sources.append(source)
    return sources


@dataclass(frozen=True)
class RowOrder:
    """Rows of each training step, epoch after epoch. A step may span two epochs.

    Each source of a mixture has its own epochs. Rows of a `ConcatenatedDataset` are numbered source after source.
    """

    n_rows: int  # Rows of an epoch: of the dataset, or of all sources of a mixture
    batch_size: int  # Rows of a step
    seed: int  # Seed of the permutations
    shuffle: bool  # Permute the rows of each epoch. If False, rows keep the order of the data.
    # Rows of each source of a mixture. Each of its epochs has every row once.
    source_rows: tuple[int, ...] = ()
    mixture: Mixture | None = None  # Source of each position. None if all rows have one order.

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """Return the rows of a step.

        Args:
            step: The step, from 0.
            start: First position in the batch.
            stop: End position in the batch. None for the end of the batch.
        """
        positions = self._positions(step, start, stop)
        if self.mixture is None:
            return self._permute(positions, self.n_rows, str(self.seed))
        sources, indices = self.mixture.locate(positions)
        rows = np.empty_like(indices)
        first_row = 0
        for source, n_rows in enumerate(self.source_rows):
            mask = sources == source
            # Each source has its own permutations, so that two sources of equal size are not read in
            # the same order.
            name = f"{self.seed} source {source}"
            rows[mask] = first_row + self._permute(indices[mask], n_rows, name)
            first_row += n_rows
        return rows

    def epochs(self, step: int) -> Int64Array:
        """Return the epoch of each row of a step: the complete passes over its source before it."""
        positions = self._positions(step, 0, None)
        if self.mixture is None:
            return positions // self.n_rows
        sources, indices = self.mixture.locate(positions)
        return indices // np.array(self.source_rows, np.int64)[sources]

    def source_counts(self, steps: int) -> list[int]:
        """Return the number of rows of each source in the first steps. Empty without a mixture."""
        if self.mixture is None:
            return []
        return self.mixture.rows_before(steps * self.batch_size).tolist()

    @property
    def steps_per_epoch(self) -> float:
        """Steps that take as many rows as an epoch has."""
        return self.n_rows / self.batch_size

    def unrounded_steps_for_epochs(self, epochs: float) -> Fraction:
        """Return the steps of a number of epochs, not rounded. Decimal fractions are exact, e.g. 0.1 is a tenth."""
        exact = Fraction(str(epochs))
        return (exact.limit_denominator(MAX_DENOMINATOR) or exact) * self.n_rows / self.batch_size

    def steps_for_epochs(self, epochs: float) -> int:
        """Return the number of steps that cover a number of epochs, at least 1."""
        return max(1, math.ceil(self.unrounded_steps_for_epochs(epochs)))

    def _positions(self, step: int, start: int, stop: int | None) -> Int64Array:
        """Return the numbers of the rows of a step in the whole run."""
        if stop is None:
            stop = self.batch_size
        return step * self.batch_size + np.arange(start, stop, dtype=np.int64)

    def _permute(self, positions: Int64Array, n_rows: int, name: str) -> Int64Array:
        """Return the rows at positions of a sequence of epochs, each with every row once."""
        # Epoch and row are the quotient and the remainder of a division by n_rows, so they do not
        # depend on batch_size. E.g. with 5 rows and a batch of 2, unshuffled step 2 has the positions
        # 4 and 5: row 4 of epoch 0, then row 0 of epoch 1.
        epochs, rows = np.divmod(positions, n_rows)
        if not self.shuffle:
            return rows
        # A batch spans few epochs. Each of them has its own permutation, e.g. "order 42 0" is the first
        # epoch of seed 42.
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = permute(rows[in_epoch], n_rows, round_keys(f"order {name} {epoch}"))
        return rows


def round_keys(name: str) -> list[int]:
    """Return the round keys of the permutation with this name."""
    return [xxhash.xxh3_64_intdigest(f"{name} {i}".encode()) for i in range(FEISTEL_ROUNDS)]


def permute(indices: Int64Array, n: int, keys: list[int]) -> Int64Array:
    """Return the images of indices under a pseudorandom permutation of 0 to n - 1.

    A Feistel network permutes all numbers of an even number of bits, at most 4 n of them. Results
    of n or more go through the network again until they are in range (cycle walking, see Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). This ends, since the cycle of an index
    contains the index itself. E.g. n = 5 uses 4-bit numbers: if 3 -> 9 -> 12 -> 1, the image of 3
    is 1.

    Args:
        indices: Indices in 0 to n - 1.
        n: Size of the permutation.
        keys: 64-bit round keys, which choose the permutation.
    """
    # Two halves of equal width hold n - 1. 2^(2 * half_bits) is at most 4 n, so that an index goes
    # through the network at most 4 times on average.
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    values = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (out_of_range := values >= n).any():
        values[out_of_range] = _feistel(values[out_of_range], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: UInt64Array, half_bits: int, keys: list[int]) -> UInt64Array:
    """Permute the numbers of 2 * half_bits bits by a Feistel network."""
    left = values >> np.uint64(half_bits)
    right = values & np.uint64((1 << half_bits) - 1)
    # A round is (L, R) -> (R, L xor F(R xor key)). It can be undone whatever F is, so it is a
    # permutation. F takes the upper bits of SplitMix64's finalizer, which are its best mixed ones.
    for key in keys:
        left, right = (
            right,
            left ^ (_splitmix64(right ^ np.uint64(key)) >> np.uint64(64 - half_bits)),
        )
    return (left << np.uint64(half_bits)) | right


def _splitmix64(values: UInt64Array) -> UInt64Array:
    """Apply the finalizer of SplitMix64: each result bit depends on all bits of the value."""
    # The constants are of Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    # 2014 (variant 13 of Stafford).
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def eval_batches(n_rows: int, batch_size: int, *, limit: int) -> Iterator[Int64Array]:
    """Yield the first `limit` rows in order, `batch_size` at a time.

    A limit of 0 means all rows. -1 pads the last batch.
    """
    count = min(n_rows, limit or n_rows)
    for low in range(0, count, batch_size):
        rows = np.arange(low, low + batch_size, dtype=np.int64)
        yield np.where(rows < count, rows, -1)


def num_eval_batches(n_rows: int, batch_size: int, *, limit: int) -> int:
    """Return the number of batches of `eval_batches`."""
    return -(-min(n_rows, limit or n_rows) // batch_size)
