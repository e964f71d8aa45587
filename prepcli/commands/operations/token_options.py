"""The options of `add_tokens` and `remove_tokens`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from prepcli.commands.operations.options import (
    SEED_SPEC,
    ConversionOptions,
    DropOptions,
    RerunOptions,
    SourceOptions,
)
from prepcli.commands.operations.strict_options import StrictOptions
from prepcli.core.option_spec import REQUIRED, NonNegativeInt, OptionSpec, PathLike


class AddTokensOptions(ConversionOptions, DropOptions, StrictOptions, total=False):
    """Options of `add_tokens`. `tokens` is required."""

    tokens: Annotated[
        PathLike,
        OptionSpec(
            "FILE",
            "Add these tokens: one per line, or a JSON list in *.json.",
            "File with the tokens: one per line, or a JSON list of strings and objects in `*.json`. Required.",
            default=REQUIRED,
            position=1,
            record=1,
        ),
    ]
    init: Annotated[
        Literal["mean", "zeros", "normal"],
        OptionSpec(
            "KIND",
            "Fill new rows with the mean of the token's pieces, zeros or normal.",
            '"mean" (the default) of the rows of the pieces into which the tokenizer splits the token now,'
            ' "zeros", or "normal" with the config\'s `initializer_range`.',
            default="mean",
            cli_type=str,
            position=12,
            record=20,
        ),
    ]
    seed: Annotated[NonNegativeInt | None, SEED_SPEC]


class RemoveTokensOptions(SourceOptions, RerunOptions, DropOptions, StrictOptions, total=False):
    """Options of `remove_tokens`."""
