"""What a run learns from, row by row; and blocks of tokens: all documents one after another, cut into equal rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from trainer.data.store import Tokens
from trainer.models.errors import PrepError

Rows: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Columns: TypeAlias = Mapping[str, tuple[int, np.dtype[Any]]]


class Dataset(Protocol):
    """Rows to learn from, those `first` to `first + n` of a store. `columns`: length and dtype of what a row has, by
    name; `seq_length`: tokens a row that are learned."""

    @property
    def first(self) -> int: ...

    @property
    def n(self) -> int: ...

    @property
    def seq_length(self) -> int: ...

    @property
    def columns(self) -> Columns: ...

    def examples(self, rows: Rows) -> Arrays:
        """What a step takes of rows, each [len(rows), length]; a row of -1 is padding: zeros, of weight 0."""
        ...


D = TypeVar("D", bound=Dataset)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks `first` to `first + n` of a store; rows are counted from `first`."""

    source: Tokens
    first: int
    n: int

    @property
    def seq_length(self) -> int:
        return self.source.seq_length

    @property
    def columns(self) -> Columns:
        kinds = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
        return {name: (self.seq_length, np.dtype(kind)) for name, kind in kinds.items()}

    def examples(self, rows: Rows) -> Arrays:
        """What a step takes of rows, each [len(rows), seq_length].

        `tokens` int32; `targets` int32, the token after each, 0 after the last; `weights` float32, 1 where there is a
        target. A row of -1 is padding: zeros, of weight 0. IndexError for a row that is not there.
        """
        wanted = checked(rows, self.n)
        table = self.source.ids[: self.source.n_blocks * self.seq_length].reshape(-1, self.seq_length)
        tokens = np.zeros((len(wanted), self.seq_length), np.int32)
        tokens[wanted >= 0] = table[self.first + wanted[wanted >= 0]]
        targets = np.zeros_like(tokens)
        targets[:, :-1] = tokens[:, 1:]
        weights = np.zeros(tokens.shape, np.float32)
        weights[wanted >= 0, :-1] = 1
        return {"tokens": tokens, "targets": targets, "weights": weights}


def checked(rows: Rows, n: int) -> npt.NDArray[np.int64]:
    """Rows as numbers, -1 for padding; IndexError for one that is not among `n`."""
    wanted = np.asarray(rows, np.int64)
    if ((wanted < -1) | (wanted >= n)).any():
        raise IndexError(f"rows {rows} of {n}")
    return wanted


def split(whole: D, holdout: float) -> tuple[D, D | None]:
    """Rows to train on, and the last part of them, `holdout` of 1 (0: none), to evaluate on.

    PrepError if one of the two would have no row.
    """
    n = whole.n
    held = round(n * holdout)
    if not holdout:
        return whole, None
    if not 0 < held < n:
        lacks = "evaluate" if held < 1 else "train"
        why = f"holdout {holdout:g} of {n:,} sequences is {held:,}"
        raise PrepError(f"no sequence is left to {lacks} on", why, "another `data.holdout`, or `data.eval_path`")
    return _part(whole, 0, n - held), _part(whole, n - held, held)


def _part(whole: Any, first: int, n: int) -> Any:
    return dataclasses.replace(whole, first=whole.first + first, n=n)
