"""The command that tokenizes data: tokenize."""

# pyright: reportTypedDictNotRequiredAccess=false
# `expand_option_groups` sets every option.

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import ProgressOption, complete_recipe
from prepcli.commands.operations.data_options import DataOptions, TokenizeArguments
from prepcli.commands.operations.sharing_options import SharingOptions
from prepcli.core.observer import LEAVES


@expand_option_groups
def tokenize(
    recipe: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE",
            autocompletion=complete_recipe,
            help="Recipe: a TOML file, or the name of one of `prep recipes`.",
            show_default=False,
        ),
    ],
    *,
    arguments: TokenizeArguments,
    options: DataOptions,
    sharing: Annotated[SharingOptions, Omit("workers")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Tokenize the data of a recipe, in one or several processes.

    `prep train` does the same before its first step. The last of several processes completes the tokens. Under `srun`
    each process takes its share.

    Examples:
      prep tokenize recipe.toml
      prep tokenize recipe.toml --show 3
      prep tokenize recipe.toml --show 3 --dry-run
      prep tokenize recipe.toml --processes 4/0
      prep tokenize recipe.toml --format megatron --out tokens
    """
    from prepcli.commands.operations.tokenize import tokenize_shard
    from prepcli.commands.rendering.tokenization import tokenization_report
    from prepcli.planning.shares import requested_share

    ui = output_options.open_console("tokenize", progress)
    share, _ = requested_share(sharing["processes"], os.environ)
    result = tokenize_shard(
        recipe, share.index, of=share.count, **arguments, progress=ui, **options
    )
    return ui.finish(tokenization_report(result, ui.columns, shows_ids=ui.level >= LEAVES))
