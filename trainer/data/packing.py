"""The dataset protocol, blocks of concatenated documents, and datasets of several sources."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from trainer.data.store import MappedTokens, TokenArray

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
            rows: Indices of rows. -1 is padding: zeros with loss weight 0.
            epochs: Epoch of each row, for rows that differ from epoch to epoch. None for epoch 0.
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
        first_input: Input token at the start of each block, None keeps the stored token. It is not
            a target.
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
            rows: Indices of B blocks. -1 is padding.
            epochs: Unused: blocks are the same in every epoch.

        Returns:
            `tokens`, int32 [B, seq_length], `targets`, int32 [B, seq_length]: the next token, 0
            after the last, and `weights`, float32 [B, seq_length]: the loss weight of the target, 0
            without a target. E.g. tokens [5, 6, 7] have targets [6, 7, 0] and weights [1, 1, 0].
            All are 0 in padding rows.

        Raises:
            IndexError: A row is out of range.
        """
        indices = check_rows(rows, self.n_rows)
        # B rows of seq_length tokens. The last position has no target: the next block's first token
        # is not read, so that blocks do not depend on each other.
        tokens = np.zeros((len(indices), self.seq_length), np.int32)
        tokens[indices >= 0] = self._read_blocks(self.tokens.ids, indices)
        targets = np.zeros_like(tokens)
        targets[:, :-1] = tokens[:, 1:]
        if self.first_input is not None:
            tokens[indices >= 0, 0] = self.first_input
        weights = np.zeros(tokens.shape, np.float32)
        stored = self.tokens.weight_codes
        # The weight of a position is the stored weight of its target, which is the token after it.
        if stored is None:
            weights[indices >= 0, :-1] = 1
        else:
            codes = self._read_blocks(stored, indices)[:, 1:]
            weights[indices >= 0, :-1] = self.tokens.decode_weights(codes)
        return {"tokens": tokens, "targets": targets, "weights": weights}

    def _read_blocks(self, array: TokenArray, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the blocks of the rows without padding, of an array with one value per token."""
        starts = (self.first_row + indices[indices >= 0]) * self.seq_length
        blocks = [array[start : start + self.seq_length] for start in starts.tolist()]
        return np.stack(blocks) if blocks else np.zeros((0, self.seq_length), np.uint8)


@dataclass(frozen=True, slots=True)
class ConcatenatedDataset:
    """The rows of several datasets, one after the other.

    Attributes:
        parts: The datasets by source name. All have the same columns.
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
        batch = {
            name: np.zeros((len(indices), length), dtype)
            for name, (length, dtype) in self.columns.items()
        }
        bounds = itertools.pairwise(
            itertools.accumulate((part.n_rows for part in self.parts.values()), initial=0)
        )
        for part, (first, end) in zip(self.parts.values(), bounds):
            mask = (indices >= first) & (indices < end)
            if mask.any():
                part_epochs = None
                if epochs is not None:
                    part_epochs = np.asarray(epochs)[mask]
                for name, array in part.get_batch(indices[mask] - first, part_epochs).items():
                    batch[name][mask] = array
        return batch


def packed_columns(seq_length: int) -> ColumnSpecs:
    """Return length and dtype of each array in a row with `seq_length` tokens, by name."""
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: (seq_length, np.dtype(dtype)) for name, dtype in dtypes.items()}


def check_rows(rows: RowIndices, n_rows: int) -> npt.NDArray[np.int64]:
    """Return rows as an int64 array. Raise IndexError unless -1 <= row < `n_rows` for each."""
    indices = np.asarray(rows, np.int64)
    if ((indices < -1) | (indices >= n_rows)).any():
        raise IndexError(f"rows {rows} of {n_rows}")
    return indices


def split_holdout(dataset: DatasetT, holdout: float) -> tuple[DatasetT, DatasetT | None]:
    """Split off the last rows of a dataset for evaluation.

    Args:
        dataset: All rows.
        holdout: Fraction of the rows to evaluate on, rounded to whole rows. 0 for none.

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
        purpose = "train"
        if n_held_out < 1:
            purpose = "evaluate"
        why = f"holdout {holdout:g} of {count_text(n_rows, 'sequence')} is {n_held_out:,}"
        raise PrepError(
            f"no sequence is left to {purpose} on",
            why,
            "set another `data.holdout`, or `data.eval_path`",
        )
    n_train = n_rows - n_held_out
    return _slice_rows(dataset, 0, n_train), _slice_rows(dataset, n_train, n_held_out)


def _slice_rows(dataset: Any, start: int, n_rows: int) -> Any:
    return dataclasses.replace(dataset, first_row=dataset.first_row + start, n_rows=n_rows)
