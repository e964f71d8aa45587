"""What a run learns from, row by row; and blocks of tokens: all documents one after another, cut into equal rows."""

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
    """Rows to learn from, those `first` to `first + n` of a store. `columns`: length and dtype of what a row has, by
    name; `seq_length`: tokens a row that are learned."""

    @property
    def first_row(self) -> int: ...

    @property
    def n_rows(self) -> int: ...

    @property
    def seq_length(self) -> int: ...

    @property
    def columns(self) -> ColumnSpecs: ...

    def get_batch(self, rows: RowIndices) -> Arrays:
        """What a step takes of rows, each [len(rows), length]; a row of -1 is padding: zeros, of weight 0."""
        ...


DatasetT = TypeVar("DatasetT", bound=Dataset)


@dataclass(frozen=True, slots=True)
class PackedDataset:
    """The blocks `first` to `first + n` of a store; rows are counted from `first`."""

    tokens: MappedTokens
    first_row: int
    n_rows: int

    @property
    def seq_length(self) -> int:
        return self.tokens.seq_length

    @property
    def columns(self) -> ColumnSpecs:
        kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
        return {name: (self.seq_length, np.dtype(kind)) for name, kind in kinds.items()}

    def get_batch(self, rows: RowIndices) -> Arrays:
        """What a step takes of rows, each [len(rows), seq_length].

        `tokens` int32; `targets` int32, the token after each, 0 after the last; `weights` float32, 1 where there is a
        target. A row of -1 is padding: zeros, of weight 0. IndexError for a row that is not there.
        """
        wanted = check_rows(rows, self.n_rows)
        table = self.tokens.ids[: self.tokens.n_blocks * self.seq_length].reshape(-1, self.seq_length)
        tokens = np.zeros((len(wanted), self.seq_length), np.int32)
        tokens[wanted >= 0] = table[self.first_row + wanted[wanted >= 0]]
        targets = np.zeros_like(tokens)
        targets[:, :-1] = tokens[:, 1:]
        weights = np.zeros(tokens.shape, np.float32)
        weights[wanted >= 0, :-1] = 1
        return {"tokens": tokens, "targets": targets, "weights": weights}


def check_rows(rows: RowIndices, n_rows: int) -> npt.NDArray[np.int64]:
    """Rows as numbers, -1 for padding; IndexError for one that is not among `n`."""
    wanted = np.asarray(rows, np.int64)
    if ((wanted < -1) | (wanted >= n_rows)).any():
        raise IndexError(f"rows {rows} of {n_rows}")
    return wanted


def split_holdout(dataset: DatasetT, holdout: float) -> tuple[DatasetT, DatasetT | None]:
    """Rows to train on, and the last part of them, `holdout` of 1 (0: none), to evaluate on.

    PrepError if one of the two would have no row.
    """
    n = dataset.n_rows
    held = round(n * holdout)
    if not holdout:
        return dataset, None
    if not 0 < held < n:
        lacks = "evaluate" if held < 1 else "train"
        why = f"holdout {holdout:g} of {n:,} sequences is {held:,}"
        raise PrepError(f"no sequence is left to {lacks} on", why, "another `data.holdout`, or `data.eval_path`")
    return _slice_rows(dataset, 0, n - held), _slice_rows(dataset, n - held, held)


def _slice_rows(dataset: Any, first: int, n_rows: int) -> Any:
    return dataclasses.replace(dataset, first=dataset.first + first, n_rows=n_rows)
