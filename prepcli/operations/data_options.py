"""The options of the operations that prepare data: `batches`, `tokenize` and `tokenize_shard`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict

from prepcli.operations.compute_options import TrainOptions
from prepcli.option_spec import option_specs

_TRAIN = option_specs(TrainOptions)


class DataOptions(TypedDict, total=False):
    """Options of `batches` and `tokenize_shard`."""

    overrides: Annotated[str | Sequence[str], _TRAIN["overrides"]]
    offline: Annotated[bool, _TRAIN["offline"]]
