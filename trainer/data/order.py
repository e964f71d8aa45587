"""Which rows a step takes: a function of the step and the seed, with no memory of what came before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import xxhash

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
FEISTEL_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The rows of each step: `size` of them, epoch after epoch; a step may begin in one epoch and end in the next.

    An epoch has each of `n_rows` rows once, in an order of its own (`shuffle`) or in that of the data.
    """

    n_rows: int
    batch_size: int
    seed: int
    shuffle: bool

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """The rows of a step's sequences `low` to `high` (all of them), whoever asks."""
        places = step * self.batch_size + np.arange(start, self.batch_size if stop is None else stop, dtype=np.int64)
        epochs, rows = np.divmod(places, self.n_rows)
        if self.shuffle:
            for epoch in np.unique(epochs):
                inside = epochs == epoch
                rows[inside] = permute(rows[inside], self.n_rows, _round_keys(self.seed, int(epoch)))
        return rows

    @property
    def steps_per_epoch(self) -> float:
        return self.n_rows / self.batch_size

    def steps_for_epochs(self, epochs: float) -> int:
        """How many steps it takes to see so many epochs, at least 1."""
        exact = Fraction(epochs).limit_denominator(1_000_000) * self.n_rows / self.batch_size
        return max(1, math.ceil(exact))


def _round_keys(seed: int, epoch: int) -> list[int]:
    return [xxhash.xxh3_64_intdigest(f"order {seed} {epoch} {number}".encode()) for number in range(FEISTEL_ROUNDS)]


def permute(indices: Int64Array, n: int, keys: list[int]) -> Int64Array:
    """Where a permutation of 0 to n puts each place; `keys` (64 bits each) choose the permutation.

    A Feistel network permutes the numbers of an even count of bits, at most 4 n of them; a place that it puts outside
    goes through it again until it is inside, which it will be, as the place itself lies on its cycle.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    values = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := values >= n).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: UInt64Array, half_bits: int, keys: list[int]) -> UInt64Array:
    left, right = values >> np.uint64(half_bits), values & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ np.uint64(key)) >> np.uint64(64 - half_bits))
    return (left << np.uint64(half_bits)) | right


def _splitmix64(values: UInt64Array) -> UInt64Array:
    """The finaliser of SplitMix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def eval_batches(n_rows: int, batch_size: int, limit: int) -> Iterator[Int64Array]:
    """The first `limit` rows (0: all) in their order, `size` at a time; -1 fills up the last batch."""
    count = min(n_rows, limit) if limit else n_rows
    for low in range(0, count, batch_size):
        rows = np.arange(low, low + batch_size, dtype=np.int64)
        yield np.where(rows < count, rows, -1)
