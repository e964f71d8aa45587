"""Examples: the texts and token ids that a record adds to the token store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenIds: TypeAlias = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Segment:
    """A separately tokenized part of a document.

    Attributes:
        content: A text, or token ids that are stored as they are.
        weight: Loss weight of its tokens as targets, 0 or 1.
        loss_spans: Start and end, in characters, of the parts of a text whose tokens have weight 1; those of all other
            tokens are 0. None for equal weights.
    """

    content: str | TokenIds
    weight: int = 1
    loss_spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A document of the token store, or a part of a long one; with an encoder, two documents.

    Attributes:
        target: Segments of the text that a decoder reads and predicts.
        nbytes: Its share of the file's bytes, for the progress.
        source: Segments that an encoder reads: a document of its own, stored before that of the target. None without
            an encoder.
        ends_document: Whether the document of the target ends with it.
    """

    target: tuple[Segment, ...]
    nbytes: int
    source: tuple[Segment, ...] | None = None
    ends_document: bool = True

    @property
    def size(self) -> int:
        """Characters and token ids of its segments."""
        return sum(len(segment.content) for segment in (*self.target, *(self.source or ())))
