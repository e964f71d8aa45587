"""The order of training rows: a pure function of step and seed, so a resumed run needs no iterator state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
FEISTEL_ROUNDS = 8
MAX_DENOMINATOR = 1_000_000_000  # of a number of epochs: 0.6666666666666667 is two thirds


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Rows of each training step, epoch after epoch; a step may span two epochs.

    Attributes:
        n_rows: Rows of the dataset. Each epoch has every row once.
        batch_size: Rows of a step.
        seed: Seed of the permutations.
        shuffle: Permute the rows of each epoch; otherwise rows keep the order of the data.
    """

    n_rows: int
    batch_size: int
    seed: int
    shuffle: bool

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """Return the rows of a step.

        Args:
            step: The step, from 0.
            start: First position in the batch.
            stop: End position in the batch; None for the whole batch.
        """
        stop = self.batch_size if stop is None else stop
        positions = step * self.batch_size + np.arange(start, stop, dtype=np.int64)
        return permute_epochs(positions, self.n_rows, str(self.seed) if self.shuffle else None)

    def epochs(self, step: int) -> Int64Array:
        """Return the epoch of each row of a step."""
        return (step * self.batch_size + np.arange(self.batch_size, dtype=np.int64)) // self.n_rows

    @property
    def steps_per_epoch(self) -> float:
        """Steps of one pass over the rows."""
        return self.n_rows / self.batch_size

    def epoch_interval(self, epochs: float) -> Fraction:
        """Return the steps of `epochs` passes over the rows, not rounded."""
        return interval_of_rows(epochs, self.n_rows, self.batch_size)

    def steps_for_epochs(self, epochs: float) -> int:
        """Return the number of steps that cover `epochs` passes over the rows, at least 1."""
        return steps_for_rows(epochs, self.n_rows, self.batch_size)


class RowOrder(Protocol):
    """The rows of each training step."""

    @property
    def n_rows(self) -> int:
        """Rows of an epoch."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows of a step."""
        ...

    @property
    def steps_per_epoch(self) -> float:
        """Steps of an epoch."""
        ...

    def rows(self, step: int, start: int = 0, stop: int | None = None) -> Int64Array:
        """Return the rows of a step, or those at some positions of its batch."""
        ...

    def epochs(self, step: int) -> Int64Array:
        """Return the epoch of each row of a step."""
        ...

    def epoch_interval(self, epochs: float) -> Fraction:
        """Return the steps of a number of epochs, not rounded."""
        ...

    def steps_for_epochs(self, epochs: float) -> int:
        """Return the number of steps that cover a number of epochs, at least 1."""
        ...


def steps_for_rows(epochs: float, n_rows: int, batch_size: int) -> int:
    """Return the number of steps that cover `epochs` passes over `n_rows` rows, at least 1."""
    return max(1, math.ceil(interval_of_rows(epochs, n_rows, batch_size)))


def interval_of_rows(epochs: float, n_rows: int, batch_size: int) -> Fraction:
    """Return the steps of `epochs` passes over `n_rows` rows, not rounded; 0.1 is exactly a tenth."""
    exact = Fraction(str(epochs))
    return (exact.limit_denominator(MAX_DENOMINATOR) or exact) * n_rows / batch_size


def permute_epochs(positions: Int64Array, n_rows: int, seed: str | None) -> Int64Array:
    """Return the rows at positions of a sequence of epochs, each of which has every row once.

    Args:
        positions: Positions from 0.
        n_rows: Rows of an epoch.
        seed: Seed of the permutation of each epoch; None for rows in the order of the data.
    """
    epochs, rows = np.divmod(positions, n_rows)
    for epoch in np.unique(epochs) if seed is not None else ():
        in_epoch = epochs == epoch
        rows[in_epoch] = permute(rows[in_epoch], n_rows, round_keys(f"order {seed} {epoch}"))
    return rows


def round_keys(name: str) -> list[int]:
    """Return the round keys of the permutation with this name."""
    return [xxhash.xxh3_64_intdigest(f"{name} {i}".encode()) for i in range(FEISTEL_ROUNDS)]


def permute(indices: Int64Array, n: int, keys: list[int]) -> Int64Array:
    """Return the images of indices under a pseudorandom permutation of 0 to n - 1.

    A Feistel network permutes all numbers of an even number of bits, at most 4 n of them. Results of n or more go
    through the network again until they are in range (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite
    Domains", 2002). This ends, since the cycle of an index contains the index itself.

    Args:
        indices: Indices in 0 to n - 1.
        n: Size of the permutation.
        keys: 64-bit round keys, which choose the permutation.
    """
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    values = _feistel(indices.astype(np.uint64), half_bits, keys)
    while (out_of_range := values >= n).any():
        values[out_of_range] = _feistel(values[out_of_range], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: UInt64Array, half_bits: int, keys: list[int]) -> UInt64Array:
    left, right = values >> np.uint64(half_bits), values & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ np.uint64(key)) >> np.uint64(64 - half_bits))
    return (left << np.uint64(half_bits)) | right


def _splitmix64(values: UInt64Array) -> UInt64Array:
    """Apply the finalizer of SplitMix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def eval_batches(n_rows: int, batch_size: int, *, limit: int) -> Iterator[Int64Array]:
    """Yield the first `limit` rows (0: all) in order, `batch_size` at a time; -1 pads the last batch."""
    count = min(n_rows, limit) if limit else n_rows
    for low in range(0, count, batch_size):
        rows = np.arange(low, low + batch_size, dtype=np.int64)
        yield np.where(rows < count, rows, -1)
