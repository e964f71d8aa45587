"""Blocks of tokens: all documents one after another, cut into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.data.store import Tokens
from trainer.errors import PrepError

Rows: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks `first` to `first + n` of a store; rows are counted from `first`."""

    source: Tokens
    first: int
    n: int

    @property
    def seq_length(self) -> int:
        return self.source.seq_length

    def tokens(self, rows: Rows) -> npt.NDArray[np.int32]:
        """The tokens of rows, [len(rows), seq_length]. IndexError for a row that is not there."""
        wanted = np.asarray(rows, np.int64)
        if ((wanted < 0) | (wanted >= self.n)).any():
            raise IndexError(f"rows {rows} of {self.n}")
        table = self.source.ids[: self.source.n_blocks * self.seq_length].reshape(-1, self.seq_length)
        return np.asarray(table[self.first + wanted], np.int32)


def split(tokens: Tokens, holdout: float) -> tuple[Blocks, Blocks | None]:
    """Blocks to train on, and the last part of them, `holdout` of 1 (0: none), to evaluate on.

    PrepError if one of the two would have no block.
    """
    n = tokens.n_blocks
    held = round(n * holdout)
    if not holdout:
        return Blocks(tokens, 0, n), None
    if not 0 < held < n:
        lacks = "evaluate" if held < 1 else "train"
        why = f"holdout {holdout:g} of {n:,} blocks is {held:,}"
        raise PrepError(f"no block is left to {lacks} on", why, "another `data.holdout`, or `data.eval_path`")
    return Blocks(tokens, 0, n - held), Blocks(tokens, n - held, held)


def examples(blocks: Blocks, rows: Rows) -> dict[str, npt.NDArray[np.int32] | npt.NDArray[np.float32]]:
    """What a step takes, each [len(rows), seq_length].

    `tokens` int32; `targets` int32, the token after each, 0 after the last; `weights` float32, 1 where there is a
    target. A row of -1 is padding: zeros, of weight 0.
    """
    wanted = np.asarray(rows, np.int64)
    tokens = np.zeros((len(wanted), blocks.seq_length), np.int32)
    tokens[wanted >= 0] = blocks.tokens(wanted[wanted >= 0])
    targets = np.zeros_like(tokens)
    targets[:, :-1] = tokens[:, 1:]
    weights = np.zeros(tokens.shape, np.float32)
    weights[wanted >= 0, :-1] = 1
    return {"tokens": tokens, "targets": targets, "weights": weights}
