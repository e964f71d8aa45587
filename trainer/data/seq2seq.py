"""Pairs of a source and a target: each is a row by itself, cut where it is too long, filled up where it is short."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.packing import Arrays, Columns, Rows, checked
from trainer.data.store import Tokens


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs `first` to `first + n` of a store that has the source of each before its target; rows are counted from
    `first`. `start`: what a decoder is given before the first token; `end`: what a text that was cut ends with."""

    held: Tokens
    source_length: int
    start: int
    end: int | None
    first: int
    n: int

    @property
    def seq_length(self) -> int:
        """Of targets."""
        return self.held.seq_length

    @property
    def columns(self) -> Columns:
        return {
            "source": (self.source_length, np.dtype(np.int32)),
            "present": (self.source_length, np.dtype(np.bool_)),
            "tokens": (self.seq_length, np.dtype(np.int32)),
            "targets": (self.seq_length, np.dtype(np.int32)),
            "weights": (self.seq_length, np.dtype(np.float32)),
        }

    def examples(self, rows: Rows) -> Arrays:
        """What a step takes of rows.

        `source` int32 and `present`, where it is no padding, each [len(rows), source_length]; `tokens` int32, those
        before each target; `targets` int32; `weights` float32, 1 where there is a target, each [len(rows), seq_length].
        A row of -1 is padding, all of it. IndexError for a row that is not there.
        """
        wanted = checked(rows, self.n)
        found = {name: np.zeros((len(wanted), length), kind) for name, (length, kind) in self.columns.items()}
        for at, row in enumerate(wanted):
            if row >= 0:
                source = self._text(2 * (self.first + row), self.source_length)
                target = self._text(2 * (self.first + row) + 1, self.seq_length)
                found["source"][at, : len(source)] = source
                found["present"][at, : len(source)] = True
                found["tokens"][at, : len(target)] = [self.start, *target[:-1]][: len(target)]
                found["targets"][at, : len(target)] = target
                found["weights"][at, : len(target)] = 1
        return found

    def _text(self, document: int, most: int) -> npt.NDArray[np.int32]:
        """The ids of a document, the first of them where it has more than `most`."""
        low, high = self._ends(document)
        ids = np.array(self.held.ids[low : min(high, low + most)], np.int32)
        if high - low > most and self.end is not None:
            ids[-1] = self.end
        return ids

    def _ends(self, document: int) -> tuple[int, int]:
        ends = self.held.ends
        return int(ends[document - 1]) if document else 0, int(ends[document])


def pairs(held: Tokens, source_length: int, start: int, end: int | None) -> Pairs:
    """All pairs of a store."""
    return Pairs(held, source_length, start, end, 0, held.n_documents // 2)


def cut_counts(held: Tokens, source_length: int) -> tuple[int, int]:
    """How many sources, and how many targets, are too long."""
    lengths = np.diff(held.ends.astype(np.int64), prepend=0)
    return int((lengths[::2] > source_length).sum()), int((lengths[1::2] > held.seq_length).sum())
