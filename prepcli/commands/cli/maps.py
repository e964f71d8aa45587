"""Commands about maps between the tensors of two checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from prepcli.commands.cli.operation_parameters import Omit
from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import CheckpointArgument, ProgressOption
from prepcli.commands.operations.inspection_options import SuggestMapArguments, SuggestMapOptions


@expand_option_groups
def suggest(
    checkpoint: CheckpointArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A checkpoint of the same model, with the names and shapes to map to.",
            show_default=False,
        ),
    ],
    *,
    arguments: SuggestMapArguments,
    options: Annotated[SuggestMapOptions, Omit("step", "lock")],
    output_options: OutputOptions,
    progress: ProgressOption = "auto",
) -> int:
    """Propose a map between two checkpoints with the same values.

    Both are read whole. Tensors that are equal, transposed or stacked have rows. The others are listed. The file is
    for --map.

    Examples:
      prep map suggest ./my-model ./my-model-hf
      prep map suggest ./my-model ./my-model-hf --out my.map
    """
    from prepcli.commands.operations.suggest_map import suggest_map
    from prepcli.commands.rendering.maps import suggestion_report

    ui = output_options.open_console("map", progress)
    suggestion = suggest_map(checkpoint, target, arguments["out"], progress=ui, **options)
    return ui.finish(suggestion_report(suggestion))
