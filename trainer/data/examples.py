"""Examples: the texts and token ids of a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import PrepError

TokenIds: TypeAlias = npt.NDArray[np.uint32]
# Start and end of a part of a text, in characters, and the loss weight of its tokens.
LossSpan: TypeAlias = tuple[int, int, float]


class RecordLimitError(PrepError):
    """A record took too much memory or time, e.g. because its chat template has endless loops.

    It is never skipped: the tokens of a dataset must not depend on the machine.
    """


@dataclass(frozen=True, slots=True)
class Segment:
    """A separately tokenized part of a document.

    Attributes:
        content: A text, or token ids to store unchanged.
        weight: Loss weight of its tokens as targets, 0 or 1.
        loss_spans: The parts of a text with loss. Other tokens have weight 0. Where parts overlap,
            the later one counts. None if `weight` is the weight of all tokens.
    """

    content: str | TokenIds
    weight: int = 1
    loss_spans: tuple[LossSpan, ...] | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """A document of the token store, or a part of a long one. With an encoder, two documents.

    Attributes:
        target: Decoder input, and the text to predict.
        nbytes: Bytes of the file that it accounts for. Progress reports add them up.
        source: Encoder input. It is stored as a separate document, before the target's. None
            without an encoder.
        ends_document: Whether the target's document ends with this example. False for all but the
            last part of a long document.
        ignored: Names of parts of the record that its tokens do not show, once per occurrence. See
            `trainer.data.ignored_parts`.
        stop_ids: Tokens that end a text when a model generates. One of them should have loss. Empty if
            that is not checked.
    """

    target: tuple[Segment, ...]
    nbytes: int
    source: tuple[Segment, ...] | None = None
    ends_document: bool = True
    ignored: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Characters and token ids of its segments."""
        return sum(len(segment.content) for segment in (*self.target, *(self.source or ())))
