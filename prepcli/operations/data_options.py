"""The options for preparing data: `batches`, `tokenize` and `tokenize_shard`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

from prepcli.operations.compute_options import TrainOptions
from prepcli.option_spec import OptionSpec, PathLike, option_specs

_TRAIN = option_specs(TrainOptions)


TokenFormat = Literal["prep", "megatron", "parquet"]


class TokenizeArguments(TypedDict, total=False):
    """Arguments of the function `tokenize_shard` with an option on the command line."""

    out: Annotated[
        PathLike | None,
        OptionSpec(
            "FOLDER",
            "Write the tokens of a run to its folder, or the files of another format to FOLDER. Default: runs/NAME.",
            "Folder of the run, or of the files of another format.",
            position=2,
        ),
    ]
    format: Annotated[
        TokenFormat,
        OptionSpec(
            "NAME",
            "Also write the tokens for another trainer: megatron or parquet.",
            'Format of the tokens: "prep", "megatron" (.idx and .bin) or "parquet".',
            default="prep",
            position=3,
        ),
    ]


class DataOptions(TypedDict, total=False):
    """Options of `batches` and `tokenize_shard`."""

    overrides: Annotated[str | Sequence[str], _TRAIN["overrides"]]
    offline: Annotated[bool, _TRAIN["offline"]]
