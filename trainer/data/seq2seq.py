"""Pairs of a source and a target: each is a row by itself, cut where it is too long, filled up where it is short."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.packing import Arrays, ColumnSpecs, RowIndices, check_rows
from trainer.data.store import MappedTokens


@dataclass(frozen=True, slots=True)
class Seq2SeqDataset:
    """The pairs `first` to `first + n` of a store that has the source of each before its target; rows are counted from
    `first`. `start`: what a decoder is given before the first token; `end`: what a text that was cut ends with."""

    tokens: MappedTokens
    source_length: int
    decoder_start_id: int
    eos_id: int | None
    first_row: int
    n_rows: int

    @property
    def seq_length(self) -> int:
        """Of targets."""
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        return {
            "source": (self.source_length, np.dtype(np.int32)),
            "present": (self.source_length, np.dtype(np.bool_)),
            "tokens": (self.seq_length, np.dtype(np.int32)),
            "targets": (self.seq_length, np.dtype(np.int32)),
            "weights": (self.seq_length, np.dtype(np.float32)),
        }

    def get_batch(self, rows: RowIndices) -> Arrays:
        """What a step takes of rows.

        `source` int32 and `present`, where it is no padding, each [len(rows), source_length]; `tokens` int32, those
        before each target; `targets` int32; `weights` float32, 1 where there is a target, each [len(rows), seq_length].
        A row of -1 is padding, all of it. IndexError for a row that is not there.
        """
        wanted = check_rows(rows, self.n_rows)
        found = {name: np.zeros((len(wanted), length), kind) for name, (length, kind) in self.columns.items()}
        for at, row in enumerate(wanted):
            if row >= 0:
                source = self._truncated_ids(2 * (self.first_row + row), self.source_length)
                target = self._truncated_ids(2 * (self.first_row + row) + 1, self.seq_length)
                found["source"][at, : len(source)] = source
                found["present"][at, : len(source)] = True
                found["tokens"][at, : len(target)] = [self.decoder_start_id, *target[:-1]][: len(target)]
                found["targets"][at, : len(target)] = target
                found["weights"][at, : len(target)] = 1
        return found

    def _truncated_ids(self, document: int, max_length: int) -> npt.NDArray[np.int32]:
        """The ids of a document, the first of them where it has more than `most`."""
        low, high = self._document_span(document)
        ids = np.array(self.tokens.ids[low : min(high, low + max_length)], np.int32)
        if high - low > max_length and self.eos_id is not None:
            ids[-1] = self.eos_id
        return ids

    def _document_span(self, document: int) -> tuple[int, int]:
        ends = self.tokens.ends
        return int(ends[document - 1]) if document else 0, int(ends[document])


def seq2seq_dataset(
    tokens: MappedTokens, source_length: int, decoder_start_id: int, eos_id: int | None
) -> Seq2SeqDataset:
    """All pairs of a store."""
    return Seq2SeqDataset(tokens, source_length, decoder_start_id, eos_id, 0, tokens.n_documents // 2)


def count_truncated(tokens: MappedTokens, source_length: int) -> tuple[int, int]:
    """How many sources, and how many targets, are too long."""
    lengths = np.diff(tokens.ends.astype(np.int64), prepend=0)
    return int((lengths[::2] > source_length).sum()), int((lengths[1::2] > tokens.seq_length).sum())
