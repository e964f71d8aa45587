"""The options of `prep map suggest`.

This module imports no NumPy, jax or huggingface_hub: every start of `prep` reads it.
"""

from __future__ import annotations

from typing import Annotated, TypedDict

from prepcli.commands.operations.options import SourceOptions
from prepcli.core.option_spec import OptionSpec, PathLike


class SuggestMapOptions(SourceOptions, total=False):
    """Options of `suggest_map`."""

    overwrite: Annotated[
        bool,
        OptionSpec(
            None,
            "Replace a map that differs.",
            "Replace a map that differs. Default: False.",
            default=False,
            position=43,
        ),
    ]


class SuggestMapArguments(TypedDict):
    """The argument of `suggest_map` that is an option of its command."""

    out: Annotated[
        PathLike | None,
        OptionSpec("FILE", "Write to FILE. Default: NAME.map.", "The map.", position=40),
    ]
