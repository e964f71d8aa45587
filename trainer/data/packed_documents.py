"""Datasets of whole documents: several per row with segment ids, or one per row and padding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.data.document_packing import DocumentRows
from trainer.data.document_rows import make_rows
from trainer.data.packing import Arrays, ColumnSpecs, RowIndices, check_rows, packed_columns
from trainer.data.store import MappedTokens
from trainer.recipe.text_fields import SEGMENTED


@dataclass(frozen=True, slots=True)
class DocumentDataset:
    """Rows of documents, or of pieces of documents longer than a row.

    Attributes:
        tokens: The token store.
        rows: The pieces of each row of the store.
        has_segments: Whether rows have `segment_ids` and `positions`. Without them a row must be
            one piece.
        first_row: Index of the first row in `rows`.
        n_rows: Number of rows.
        first_input: Input token at the start of each piece, None keeps the stored token. It is not
            a target.
    """

    tokens: MappedTokens
    rows: DocumentRows
    has_segments: bool
    first_row: int
    n_rows: int
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
        """Return a batch of rows.

        Args:
            rows: Indices of B rows. -1 is padding.
            epochs: Unused: rows are the same in every epoch.

        Returns:
            `tokens`, int32 [B, seq_length], `targets`, int32 [B, seq_length]: the next token of the
            same piece, 0 after its last, and `weights`, float32 [B, seq_length]: the loss weight of
            the target, 0 without a target. With segments also `segment_ids`, int32 [B, seq_length]:
            1 for the first piece of a row, 2 for the second and so on, and `positions`, int32 [B,
            seq_length]: position of each token in its piece. All are 0 in padding.

        Raises:
            IndexError: A row is out of range.
        """
        indices = check_rows(rows, self.n_rows)
        columns = document_columns(self.seq_length, has_segments=True)
        batch = {
            name: np.zeros((len(indices), length), dtype)
            for name, (length, dtype) in columns.items()
        }
        for i, row in enumerate(indices.tolist()):
            if row >= 0:
                self._fill_row(
                    {name: array[i] for name, array in batch.items()}, self.first_row + row
                )
        return {name: batch[name] for name in self.columns}

    def _fill_row(self, arrays: Arrays, row: int) -> None:
        """Write the pieces of a row of the store one after another."""
        low = 0
        for segment, (start, length) in enumerate(self.rows.pieces(row), 1):
            high = low + length
            stored = slice(start + 1, start + length)
            arrays["tokens"][low:high] = self.tokens.ids[start : start + length]
            arrays["targets"][low : high - 1] = self.tokens.ids[stored]
            # The last token of a piece has no target, so targets and weights end one place earlier.
            if self.tokens.weight_codes is None:
                arrays["weights"][low : high - 1] = 1
            else:
                codes = self.tokens.weight_codes[stored]
                arrays["weights"][low : high - 1] = self.tokens.decode_weights(codes)
            arrays["segment_ids"][low:high] = segment
            arrays["positions"][low:high] = np.arange(length)
            if self.first_input is not None:
                arrays["tokens"][low] = self.first_input
            low = high


def document_dataset(
    tokens: MappedTokens, packing: str, *, first_input: int | None = None
) -> DocumentDataset:
    """Return the dataset of all rows of a token store.

    Args:
        tokens: The token store. If it has no rows, they are made in memory.
        packing: The recipe's `data.packing`.
        first_input: Input token at the start of each piece, instead of the stored one.
    """
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
