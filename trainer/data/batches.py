"""The batches of a run for a training loop of the user, in one or several processes.

A batch is a function of its step. The only state of the iterator is therefore a number, and a start
in the middle of an epoch reads nothing before it. `trainer.training.loop` reads the same rows of the
same dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from prepcli.core.errors import PrepError, usage_error
from prepcli.core.formatting import count_text
from trainer.data.order import RowOrder
from trainer.data.packing import Arrays, ColumnSpecs, Dataset

# Digests of rows are added modulo this number.
DIGEST_MODULUS = 1 << 128


class BatchDigest:
    """A digest of the rows of batches.

    It depends on the step, the position and the content of each row, and not on the order of the
    additions. The digests of the shares of several processes add up to the digest of the whole
    batches.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self._total = 0

    def update(self, batch: Arrays, step: int, first_row: int = 0) -> None:
        """Add the rows of a batch, or of a part of it that begins at the position `first_row`."""
        columns = [(name, np.ascontiguousarray(batch[name])) for name in sorted(batch)]
        n_rows = len(columns[0][1])
        for row in range(n_rows):
            state = xxhash.xxh3_128(f"step {step} row {first_row + row}".encode())
            for name, array in columns:
                # Arrays of equal bytes and other dtypes are other batches.
                state.update(f" {name} {array.dtype.str} ".encode())
                state.update(array[row].data)
            self._total = (self._total + state.intdigest()) % DIGEST_MODULUS

    def merge(self, other: BatchDigest) -> None:
        """Add the rows of another digest."""
        self._total = (self._total + other._total) % DIGEST_MODULUS

    def hexdigest(self) -> str:
        """Return the digest as 32 hexadecimal digits."""
        return f"{self._total:032x}"


class Batches:
    """Iterator over the batches of a run, or over the share of one process.

    The share is a range of consecutive rows of each batch. All shares together are the batch. If
    `of` does not divide the rows of a batch, two shares differ by at most one row.

    Attributes:
        step: Step of the next batch, from 0. Save it in your checkpoint, and start there again.
        steps: Steps of the run. The iterator ends after them.
        batch_size: Rows of a whole batch.
        first_row: Position in the whole batch of the first row of this process.
        n_rows: Rows of a batch in the share of this process.
        columns: Length and dtype of each array, by name.
        identity: Digest of the tokens of the run.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: RowOrder,
        *,
        steps: int,
        identity: str,
        reopen: Callable[..., Batches],
        process: int = 0,
        of: int = 1,
        start: int = 0,
    ) -> None:
        """Create an iterator.

        Args:
            dataset: Rows to train on.
            order: Rows of each step.
            steps: Steps of the run.
            identity: Digest of the tokens.
            reopen: Opens the same share in another process, given `start`.
            process: Index of this process, from 0.
            of: Number of processes.
            start: Step of the first batch.

        Raises:
            UsageError: The process or the start is out of range.
        """
        check_share(process, of, order.batch_size)
        if not 0 <= start <= steps:
            why = f"the run has {count_text(steps, 'step')}"
            raise usage_error(f"`start` is {start:,}", why, f"0 to {steps:,}")
        self._dataset = dataset
        self._order = order
        self._reopen = reopen
        self.step = start
        self.steps = steps
        self.identity = identity
        self.batch_size = order.batch_size
        self.first_row = share_start(order.batch_size, process, of)
        self.n_rows = share_start(order.batch_size, process + 1, of) - self.first_row

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array, by name."""
        return self._dataset.columns

    def __iter__(self) -> Batches:
        """Return the iterator itself."""
        return self

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return self.steps - self.step

    def __next__(self) -> Arrays:
        """Return the batch of the next step."""
        # The step grows after the read. An interrupted read leaves the iterator at the same batch.
        if self.step == self.steps:
            raise StopIteration
        batch = self.batch(self.step)
        self.step += 1
        return batch

    def batch(self, step: int) -> Arrays:
        """Return the batch of any step, or the share of this process. The iterator stays at its step.

        Raises:
            IndexError: The run has no such step.
        """
        return self._read(step, self.first_row, self.first_row + self.n_rows)

    def digest(self, start: int = 0, stop: int | None = None) -> str:
        """Return the digest of whole batches of some steps. It is the same in all processes, however many there are.

        The batches are read. `BatchDigest` computes the same digest from arrays.
        """
        digest = BatchDigest()
        if stop is None:
            stop = self.steps
        for step in range(start, stop):
            digest.update(self._read(step, 0, self.batch_size), step)
        return digest.hexdigest()

    def _read(self, step: int, first_row: int, end_row: int) -> Arrays:
        """Return the rows of a batch at some of its positions."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        rows = self._order.rows(step, first_row, end_row)
        epochs = self._order.epochs(step)[first_row:end_row]
        return self._dataset.get_batch(rows, epochs)

    def __reduce__(self) -> tuple[Callable[..., Batches], tuple[Any, ...]]:
        """Pickle the arguments: a pickled memory map would have all tokens."""
        return _reopen_batches, (self._reopen, self.step, self.identity)


def _reopen_batches(reopen: Callable[..., Batches], start: int, identity: str) -> Batches:
    """Return a copy at a step. Raise PrepError if the tokens have changed since the original."""
    batches = reopen(start=start)
    if batches.identity != identity:
        why = f"its tokens are {batches.identity}, they were {identity}"
        raise PrepError("the data has changed during the run", why, "start again with the new data")
    return batches


def share_start(batch_size: int, process: int, of: int) -> int:
    """Return the position in a batch of the first row of a process.

    E.g. 8 rows among 3 processes start at 0, 2 and 5.
    """
    # Whole numbers: the end of a share is the start of the next one, without gaps and overlaps.
    return batch_size * process // of


def check_share(process: int, of: int, batch_size: int) -> None:
    """Check the share of a process.

    Raises:
        UsageError: There is no such process, or more processes than rows in a batch.
    """
    if not 0 <= process < of:
        raise usage_error(f"`process` is {process}", f"`of` is {of}", f"0 to {of - 1}")
    if of > batch_size:
        why = f"a batch has {count_text(batch_size, 'sequence')}, so some processes would get none"
        raise usage_error(f"`of` is {of:,}", why, f"at most {batch_size:,}, or a larger batch")
