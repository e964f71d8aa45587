"""The options for preparing data: `batches`, `tokenize` and `tokenize_shard`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

from prepcli.commands.operations.compute_options import TrainOptions
from prepcli.core.option_spec import NonNegativeInt, OptionSpec, PathLike, option_specs

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
    show: Annotated[
        NonNegativeInt | None,
        OptionSpec(
            "N",
            "Show the first N samples of each source, with their tokens with loss marked, and a table of all samples.",
            "Number of samples of each source to read as text, with the counts of all samples. Default: neither.",
            position=4,
        ),
    ]
    html: Annotated[
        PathLike | None,
        OptionSpec(
            "FILE",
            "Write a page with the samples and the table of --show.",
            "File of a page with the samples and the counts of `show`. Default: none.",
            position=5,
        ),
    ]
    dry_run: Annotated[
        bool,
        OptionSpec(
            None,
            "Keep no tokens: only show samples.",
            "Keep no tokens, and only return samples.",
            default=False,
            position=6,
        ),
    ]


class DataOptions(TypedDict, total=False):
    """Options of `batches` and `tokenize_shard`."""

    overrides: Annotated[str | Sequence[str], _TRAIN["overrides"]]
    offline: Annotated[bool, _TRAIN["offline"]]
