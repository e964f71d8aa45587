"""The command `prep plan`."""

# pyright: reportTypedDictNotRequiredAccess=false
# `expand_option_groups` sets every option.

from __future__ import annotations

from typing import Annotated

import typer

from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import complete_recipe_or_checkpoint
from prepcli.commands.operations.inspection_options import MeshSearchOptions, PlanOptions


@expand_option_groups
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_CHECKPOINT",
            help="Recipe (.toml, or the name of one of `prep recipes`), or a folder, alias or hub id.",
            autocompletion=complete_recipe_or_checkpoint,
            show_default=False,
        ),
    ],
    *,
    options: PlanOptions,
    search_options: MeshSearchOptions,
    output_options: OutputOptions,
) -> int:
    """Estimate memory and time of a training step.

    A plan needs no accelerator, weights or data. If the recipe's checkpoint does not exist,
    its name selects a published config.

    Examples:
      prep plan llama-7b-32k --devices v5p
      prep plan recipe.toml --devices H100:16 --search
      prep plan llama-7b-32k --devices v5p --compile
      prep plan llama-13b-init --mesh 1,64,4 --html plan.html
    """
    from prepcli.commands.operations.plan import fitting_meshes
    from prepcli.commands.operations.plan import plan as run
    from prepcli.commands.rendering.training_plans import meshes_report, step_plan_report

    ui = output_options.open_console("plan")
    if search_options["search"]:
        meshes = fitting_meshes(target, progress=ui, **options)
        return ui.finish(meshes_report(meshes, ui))
    return ui.finish(step_plan_report(run(target, progress=ui, **options), ui.columns))
