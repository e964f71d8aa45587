"""The tokens of consecutive examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.examples import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class EncodedBatch:
    """Tokens of consecutive examples.

    Attributes:
        ids: Token ids of all documents, one document after the other.
        weights: Loss weight of each token as a target, 0 to 1, float32. None if all are 1.
        ends: End of each complete document in `ids`. Tokens after the last end are the first part of a
            document of the next batch.
        ignored: Number of each ignored part of the examples, by name.
    """

    ids: TokenIds
    weights: npt.NDArray[np.float32] | None
    ends: npt.NDArray[np.int64]
    ignored: Mapping[str, int]
