"""Overlapping windows of concatenated documents, for the perplexity of a text that is longer than a row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prepcli.core.errors import Key, text, usage_error
from trainer.data.packing import (
    Arrays,
    ColumnSpecs,
    Dataset,
    PackedDataset,
    RowIndices,
    check_rows,
    packed_columns,
)
from trainer.data.store import MappedTokens

STRIDE_KEY = "eval.stride"


@dataclass(frozen=True, slots=True)
class WindowDataset:
    """Windows over the tokens `low` to `high` of a store: each token is a target once.

    With windows of 4 tokens and stride 2, tokens 0 to 7 are read as 0123, 2345 and 4567, with the targets 123, 45 and
    67. Each target but the first ones thus has at least 2 tokens before it.

    Attributes:
        tokens: The token store.
        low: First token.
        high: End of the tokens.
        stride: Tokens between the starts of two windows, at most the length of a window.
        first_input: See `PackedDataset`.
    """

    tokens: MappedTokens
    low: int
    high: int
    stride: int
    first_input: int | None = None

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
        indices = check_rows(rows, self.n_rows)
        batch = {
            name: np.zeros((len(indices), length), dtype)
            for name, (length, dtype) in self.columns.items()
        }
        for i, row in enumerate(indices.tolist()):
            if row >= 0:
                self._fill_row({name: array[i] for name, array in batch.items()}, row)
        return batch

    def _fill_row(self, arrays: Arrays, row: int) -> None:
        start = self.low + row * self.stride
        end = min(start + self.seq_length, self.high)
        length = end - start
        arrays["tokens"][:length] = self.tokens.ids[start:end]
        arrays["targets"][: length - 1] = self.tokens.ids[start + 1 : end]
        # The first token of a window has no token before it.
        first_target = start + 1
        if row:
            first_target = max(first_target, start - self.stride + self.seq_length)
        # The weight of a position is that of its target, the token after it.
        weighted = arrays["weights"][first_target - start - 1 : length - 1]
        weighted[:] = 1
        if self.tokens.weight_codes is not None:
            weighted[:] = self.tokens.decode_weights(self.tokens.weight_codes[first_target:end])
        if self.first_input is not None:
            arrays["tokens"][0] = self.first_input


def with_stride(dataset: Dataset, stride: int | None) -> Dataset:
    """Return the windows over the tokens of a dataset, or the dataset itself without a stride.

    Raises:
        UsageError: The dataset does not have concatenated documents.
    """
    if stride is None:
        return dataset
    if not isinstance(dataset, PackedDataset):
        what = f"`{STRIDE_KEY}` is {stride}"
        why = "windows need concatenated texts, and each row of this data has its own examples"
        raise usage_error(what, why, text("remove {}", Key(STRIDE_KEY)))
    length = dataset.seq_length
    low = dataset.first_row * length
    high = low + dataset.n_rows * length
    # Blocks leave out the last tokens of a store. Windows read all tokens.
    if dataset.first_row + dataset.n_rows == dataset.tokens.n_blocks:
        high = dataset.tokens.n_tokens
    return WindowDataset(dataset.tokens, low, high, stride, dataset.first_input)
