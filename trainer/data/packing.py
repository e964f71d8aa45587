"""The dataset protocol, and packed datasets: all documents concatenated and cut into blocks of equal length."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.store import MappedTokens
from trainer.models.errors import PrepError

RowIndices: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
ColumnSpecs: TypeAlias = Mapping[str, tuple[int, np.dtype[Any]]]


class Dataset(Protocol):
    """A range of training rows in a token store. Rows are indexed from 0 to `n_rows`."""

    @property
    def first_row(self) -> int:
        """Index in the store of the dataset's first row."""
        ...

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def seq_length(self) -> int:
        """Predicted tokens per row."""
        ...

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        ...

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return the columns of rows, each [len(rows), length].

        Args:
            rows: Indices of rows; -1 is padding: zeros with loss weight 0.
            epochs: Epoch of each row, for rows that differ from epoch to epoch; None for epoch 0.
        """
        ...


DatasetT = TypeVar("DatasetT", bound=Dataset)


@dataclass(frozen=True, slots=True)
class PackedDataset:
    """Blocks of concatenated documents.

    Attributes:
        tokens: The token store.
        first_row: Index in the store of the first block.
        n_rows: Number of blocks.
        first_input: Input token at the start of each block, instead of the stored one; None for the stored one. It is
            not a target.
    """

    tokens: MappedTokens
    first_row: int
    n_rows: int
    first_input: int | None = None

    @property
    def seq_length(self) -> int:
        """Tokens per block."""
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return packed_columns(self.seq_length)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of blocks.

        Args:
            rows: Indices of B blocks; -1 for padding.
            epochs: Unused: blocks are the same in every epoch.

        Returns:
            `tokens`, int32 [B, seq_length]; `targets`, int32 [B, seq_length]: the next token, 0 after the last;
            `weights`, float32 [B, seq_length]: the loss weight of the target, 0 where there is none. All are 0 in
            padding rows.

        Raises:
            IndexError: A row is out of range.
        """
        indices = check_rows(rows, self.n_rows)
        tokens = np.zeros((len(indices), self.seq_length), np.int32)
        tokens[indices >= 0] = self._blocks(self.tokens.ids, indices)
        targets = np.zeros_like(tokens)
        targets[:, :-1] = tokens[:, 1:]
        if self.first_input is not None:
            tokens[indices >= 0, 0] = self.first_input
        weights = np.zeros(tokens.shape, np.float32)
        stored = self.tokens.weights
        weights[indices >= 0, :-1] = 1 if stored is None else self._blocks(stored, indices)[:, 1:]
        return {"tokens": tokens, "targets": targets, "weights": weights}

    def _blocks(self, array: npt.NDArray[Any], indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the blocks of the rows besides padding, of an array with one value per token."""
        blocks = array[: self.tokens.n_blocks * self.seq_length].reshape(-1, self.seq_length)
        return blocks[self.first_row + indices[indices >= 0]]


def packed_columns(seq_length: int) -> ColumnSpecs:
    """Return length and dtype of each array of a row of `seq_length` tokens, by name."""
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: (seq_length, np.dtype(dtype)) for name, dtype in dtypes.items()}


def check_rows(rows: RowIndices, n_rows: int) -> npt.NDArray[np.int64]:
    """Return rows as an int64 array; raise IndexError if one is not in -1 (padding) to `n_rows - 1`."""
    indices = np.asarray(rows, np.int64)
    if ((indices < -1) | (indices >= n_rows)).any():
        raise IndexError(f"rows {rows} of {n_rows}")
    return indices


def split_holdout(dataset: DatasetT, holdout: float) -> tuple[DatasetT, DatasetT | None]:
    """Split off the last rows of a dataset for evaluation.

    Args:
        dataset: All rows.
        holdout: Fraction of the rows to evaluate on, rounded to whole rows; 0 for none.

    Returns:
        The training rows, and the evaluation rows or None.

    Raises:
        PrepError: One of the two parts would be empty.
    """
    n_rows = dataset.n_rows
    n_held_out = round(n_rows * holdout)
    if not holdout:
        return dataset, None
    if not 0 < n_held_out < n_rows:
        purpose = "evaluate" if n_held_out < 1 else "train"
        why = f"holdout {holdout:g} of {n_rows:,} sequences is {n_held_out:,}"
        raise PrepError(f"no sequence is left to {purpose} on", why, "another `data.holdout`, or `data.eval_path`")
    n_train = n_rows - n_held_out
    return _slice_rows(dataset, 0, n_train), _slice_rows(dataset, n_train, n_held_out)


def _slice_rows(dataset: Any, start: int, n_rows: int) -> Any:
    return dataclasses.replace(dataset, first_row=dataset.first_row + start, n_rows=n_rows)
