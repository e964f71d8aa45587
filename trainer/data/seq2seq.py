"""Datasets of (source, target) pairs for encoder-decoder models, one padded pair per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.packing import Arrays, ColumnSpecs, RowIndices, check_rows, packed_columns
from trainer.data.store import MappedTokens


@dataclass(frozen=True, slots=True)
class Seq2SeqDataset:
    """Pairs of a token store: the source of each pair, then its target.

    Attributes:
        tokens: The token store.
        source_length: Maximum tokens of a source.
        decoder_start_id: First decoder input token.
        eos_id: Replaces the last token of a truncated source or target. None keeps the last token.
        first_row: Index in the store of the first pair.
        n_rows: Number of pairs.
    """

    tokens: MappedTokens
    source_length: int
    decoder_start_id: int
    eos_id: int | None
    first_row: int
    n_rows: int

    @property
    def seq_length(self) -> int:
        """Maximum tokens of a target."""
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        """Length and dtype of each array of a row, by name."""
        return seq2seq_columns(self.source_length, self.seq_length)

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        """Return a batch of pairs.

        Args:
            rows: Indices of B pairs. -1 is padding.
            epochs: Unused: pairs are the same in every epoch.

        Returns:
            `source`, int32 [B, source_length], `present`, bool [B, source_length]: True where
            `source` is not padding, `tokens`, int32 [B, seq_length]: decoder inputs, the targets
            shifted right, `targets`, int32 [B, seq_length], and `weights`, float32 [B, seq_length]:
            the loss weight of the target, 0 without a target. E.g. targets [7, 8, 1] have tokens
            [decoder_start_id, 7, 8]. All are 0 in padding rows.

        Raises:
            IndexError: A row is out of range.
        """
        indices = check_rows(rows, self.n_rows)
        batch = {
            name: np.zeros((len(indices), length), dtype)
            for name, (length, dtype) in self.columns.items()
        }
        for i, row in enumerate(indices):
            if row >= 0:
                # The source of pair p is document 2p of the store, its target is document 2p + 1.
                source = self._truncated_ids(2 * (self.first_row + row), self.source_length)
                target = self._truncated_ids(2 * (self.first_row + row) + 1, self.seq_length)
                batch["source"][i, : len(source)] = source
                batch["present"][i, : len(source)] = True
                batch["tokens"][i, : len(target)] = [self.decoder_start_id, *target[:-1]][
                    : len(target)
                ]
                batch["targets"][i, : len(target)] = target
                batch["weights"][i, : len(target)] = self._target_weights(row, len(target))
        return batch

    def target_ids(self, row: int) -> npt.NDArray[np.int32]:
        """Return all tokens with loss of a pair's target, before truncation."""
        low, high = self._document_span(2 * (self.first_row + row) + 1)
        ids = np.array(self.tokens.ids[low:high], np.int32)
        if self.tokens.weight_codes is None:
            return ids
        return ids[self.tokens.weight_codes[low:high] > 0]

    def _truncated_ids(self, document: int, max_length: int) -> npt.NDArray[np.int32]:
        """Return the ids of a document, cut to `max_length`. A cut document ends with `eos_id`."""
        low, high = self._document_span(document)
        ids = np.array(self.tokens.ids[low : min(high, low + max_length)], np.int32)
        if high - low > max_length and self.eos_id is not None:
            ids[-1] = self.eos_id
        return ids

    def _target_weights(self, row: int, length: int) -> npt.NDArray[np.float32] | int:
        """Return the loss weight of each token in a target with `length` tokens."""
        if self.tokens.weight_codes is None:
            return 1
        low, _ = self._document_span(2 * (self.first_row + row) + 1)
        return self.tokens.decode_weights(self.tokens.weight_codes[low : low + length])

    def _document_span(self, document: int) -> tuple[int, int]:
        """Return the start and end of a document in the store's tokens."""
        # The first document starts at 0.
        bounds = [0, *self.tokens.ends[max(document - 1, 0) : document + 1].tolist()]
        return bounds[-2], bounds[-1]


def seq2seq_dataset(
    tokens: MappedTokens, source_length: int, *, decoder_start_id: int, eos_id: int | None
) -> Seq2SeqDataset:
    """Return the dataset of all pairs of a token store."""
    return Seq2SeqDataset(
        tokens=tokens,
        source_length=source_length,
        decoder_start_id=decoder_start_id,
        eos_id=eos_id,
        first_row=0,
        n_rows=tokens.n_documents // 2,
    )


def seq2seq_columns(source_length: int, seq_length: int) -> ColumnSpecs:
    """Return length and dtype of each array of a row, by name."""
    return {
        "source": (source_length, np.dtype(np.int32)),
        "present": (source_length, np.dtype(np.bool_)),
        **packed_columns(seq_length),
    }
