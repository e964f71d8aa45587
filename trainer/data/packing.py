"""Datasets of a decoder: blocks of concatenated documents, windows over them, whole documents, and several sources."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Key, PrepError, UsageError, text, usage_error
from prepcli.core.formatting import count_text
from trainer.data.document_packing import DocumentRows
from trainer.data.document_rows import make_rows
from trainer.data.store import MappedTokens
from trainer.recipe.text_fields import SEGMENTED

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


def fill_batch(
    dataset: Dataset,
    rows: RowIndices,
    fill_row: Callable[[Arrays, int, int], None],
    epochs: RowIndices | None = None,
) -> Arrays:
    """Return a batch of rows, as `Dataset.get_batch` does.

    `fill_row` writes the row of an index and an epoch into its arrays, which are zeros.

    Raises:
        IndexError: A row is out of range.
    """
    indices = check_rows(rows, dataset.n_rows)
    batch: Arrays = {}
    for name, (length, dtype) in dataset.columns.items():
        batch[name] = np.zeros((len(indices), length), dtype)
    if epochs is None:
        epochs = np.zeros_like(indices)
    for i, (row, epoch) in enumerate(zip(indices.tolist(), epochs)):
        if row >= 0:
            fill_row({name: array[i] for name, array in batch.items()}, row, int(epoch))
    return batch


def fill_tokens(
    arrays: Arrays,
    tokens: MappedTokens,
    start: int,
    end: int,
    *,
    first_input: int | None,
    first_target: int | None = None,
) -> None:
    """Write consecutive tokens of a store to the start of a row, with their targets and weights.

    The target of a position is the token after it, and its weight the stored weight of the target. The last token has
    no target: the token after `end` is not read, so that rows do not depend on each other.
    E.g. tokens [5, 6, 7] have targets [6, 7, 0] and weights [1, 1, 0].

    Args:
        arrays: `tokens`, `targets` and `weights` of the row.
        tokens: The store.
        start: First token.
        end: End of the tokens.
        first_input: Input instead of the first token. None keeps it. It is not a target.
        first_target: First token with a weight. None for the one after `start`.
    """
    if first_target is None:
        first_target = start + 1
    length = end - start
    arrays["tokens"][:length] = tokens.ids[start:end]
    arrays["targets"][: length - 1] = arrays["tokens"][1:length]
    weights = arrays["weights"][first_target - start - 1 : length - 1]
    weights[:] = 1 if tokens.weight_codes is None else tokens.read_weights(first_target, end)
    if first_input is not None:
        arrays["tokens"][0] = first_input


@dataclass(frozen=True, slots=True)
class PackedDataset:
    """Blocks of concatenated documents."""

    tokens: MappedTokens  # The token store
    first_row: int  # Index in the store of the first block
    n_rows: int  # Number of blocks
    # Input token at the start of each block, None keeps the stored token. It is not a target.
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
        """Return a batch of blocks, which are the same in every epoch.

        Returns:
            `tokens`, int32 [B, seq_length], `targets`, int32 [B, seq_length]: the next token, 0
            after the last, and `weights`, float32 [B, seq_length]: the loss weight of the target, 0
            without a target. All are 0 in padding rows.
        """
        return fill_batch(self, rows, self._fill_row)

    def _fill_row(self, arrays: Arrays, row: int, epoch: int) -> None:
        start = (self.first_row + row) * self.seq_length
        end = start + self.seq_length
        fill_tokens(arrays, self.tokens, start, end, first_input=self.first_input)


STRIDE_KEY = "eval.stride"


@dataclass(frozen=True, slots=True)
class WindowDataset:
    """Windows over the tokens `low` to `high` of a store: each token is a target once.

    With windows of 4 tokens and stride 2, tokens 0 to 7 are read as 0123, 2345 and 4567, with the targets 123, 45 and
    67. Each target but the first ones thus has at least 2 tokens before it.
    """

    tokens: MappedTokens  # The token store
    low: int  # First token
    high: int  # End of the tokens
    stride: int  # Tokens between the starts of two windows, at most the length of a window
    first_input: int | None = None  # See `PackedDataset`

    @property
    def first_row(self) -> int:
        """Index of the first window."""
        return 0

    @property
    def n_rows(self) -> int:
        """Number of windows. The last one is the first that reaches the end."""
        rest = max(0, self.high - self.low - self.seq_length)
        return 1 + -(-rest // self.stride)

    @property
    def seq_length(self) -> int:
        """Tokens per window."""
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return packed_columns(self.seq_length)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of windows, as `PackedDataset.get_batch` does. Targets of an earlier window have no weight."""
        return fill_batch(self, rows, self._fill_row)

    def _fill_row(self, arrays: Arrays, row: int, epoch: int) -> None:
        start = self.low + row * self.stride
        end = min(start + self.seq_length, self.high)
        # The first token of a window has no token before it.
        first_target = start + 1
        if row:
            first_target = max(first_target, start - self.stride + self.seq_length)
        fill_tokens(
            arrays,
            self.tokens,
            start,
            end,
            first_input=self.first_input,
            first_target=first_target,
        )


def with_stride(dataset: Dataset, stride: int | None) -> Dataset:
    """Return the windows over the tokens of a dataset, or the dataset itself without a stride.

    Raises:
        UsageError: The dataset does not have concatenated documents.
    """
    if stride is None:
        return dataset
    if not isinstance(dataset, PackedDataset):
        raise stride_error(stride)
    length = dataset.seq_length
    low = dataset.first_row * length
    high = low + dataset.n_rows * length
    # Blocks leave out the last tokens of a store. Windows read all tokens.
    if dataset.first_row + dataset.n_rows == dataset.tokens.n_blocks:
        high = dataset.tokens.n_tokens
    return WindowDataset(dataset.tokens, low, high, stride, dataset.first_input)


def stride_error(stride: int) -> UsageError:
    """Return the error for windows over data without concatenated documents."""
    what = f"`{STRIDE_KEY}` is {stride}"
    why = "windows need concatenated texts, and each row of this data has its own examples"
    return usage_error(what, why, text("remove {}", Key(STRIDE_KEY)))


@dataclass(frozen=True, slots=True)
class DocumentDataset:
    """Rows of documents, or of pieces of documents longer than a row."""

    tokens: MappedTokens  # The token store
    rows: DocumentRows  # The pieces of each row of the store
    # Whether rows have `segment_ids` and `positions`. Without them a row must be one piece.
    has_segments: bool
    first_row: int  # Index of the first row in `rows`
    n_rows: int  # Number of rows
    # Input token at the start of each piece, None keeps the stored token. It is not a target.
    first_input: int | None = None

    @property
    def seq_length(self) -> int:
        """Length of a row in tokens."""
        return self.rows.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return document_columns(self.seq_length, has_segments=self.has_segments)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of rows, which are the same in every epoch.

        Returns:
            `tokens`, int32 [B, seq_length], `targets`, int32 [B, seq_length]: the next token of the
            same piece, 0 after its last, and `weights`, float32 [B, seq_length]: the loss weight of
            the target, 0 without a target. With segments also `segment_ids`, int32 [B, seq_length]:
            1 for the first piece of a row, 2 for the second and so on, and `positions`, int32 [B,
            seq_length]: position of each token in its piece. All are 0 in padding.
        """
        return fill_batch(self, rows, self._fill_row)

    def _fill_row(self, arrays: Arrays, row: int, epoch: int) -> None:
        low = 0
        for segment, (start, length) in enumerate(self.rows.pieces(self.first_row + row), 1):
            piece = {name: array[low : low + length] for name, array in arrays.items()}
            fill_tokens(piece, self.tokens, start, start + length, first_input=self.first_input)
            if self.has_segments:
                piece["segment_ids"][:] = segment
                piece["positions"][:] = np.arange(length)
            low += length


def document_dataset(
    tokens: MappedTokens, packing: str, *, first_input: int | None = None
) -> DocumentDataset:
    """Return the dataset of all rows of a token store. If it has no rows, they are made in memory."""
    rows = tokens.rows or make_rows(tokens, packing)
    return DocumentDataset(
        tokens, rows, packing == SEGMENTED, first_row=0, n_rows=rows.n_rows, first_input=first_input
    )


def document_columns(seq_length: int, *, has_segments: bool) -> ColumnSpecs:
    """Return length and dtype of each array of a row, by name."""
    columns = dict(packed_columns(seq_length))
    if has_segments:
        columns["segment_ids"] = (seq_length, np.dtype(np.int32))
        columns["positions"] = (seq_length, np.dtype(np.int32))
    return columns


@dataclass(frozen=True, slots=True)
class ConcatenatedDataset:
    """The rows of several datasets, one after the other."""

    parts: Mapping[str, Dataset]  # The datasets by source name. All have the same columns.

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
    rows: Any = dataset
    evaluation = dataclasses.replace(rows, first_row=rows.first_row + n_train, n_rows=n_held_out)
    return dataclasses.replace(rows, n_rows=n_train), evaluation
