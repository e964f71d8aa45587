"""The command `prep plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.cli.options import (
    ConfigOption,
    OfflineOption,
    complete_devices,
    complete_recipe_or_checkpoint,
)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options for the compilation of the step."""

    compile_step: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the step for --devices; show XLA's memory and collectives."
        ),
    ] = False
    compile_timeout: Annotated[
        float | None,
        typer.Option(
            "--compile-timeout",
            metavar="SECONDS",
            min=0.01,
            help="End the compilation after SECONDS; default: no limit.",
            show_default=False,
        ),
    ] = None


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
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a key, for example data.seq_length=8192.",
            show_default=False,
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            "--mesh",
            metavar="DP,FSDP,MP",
            help="Plan for this device mesh; default: the recipe's.",
            show_default=False,
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="KIND[:N]",
            help="Plan for N devices of KIND, for example v5p:256; N alone: of any kind; default: all kinds.",
            autocompletion=complete_devices,
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="List the meshes on which the step fits.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Write a page with charts.", show_default=False
        ),
    ] = None,
    config: ConfigOption = None,
    offline: OfflineOption = False,
    *,
    compile_options: CompileOptions,
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
    from prepcli.commands.plan import PlanRequest
    from prepcli.commands.plan import plan as run

    ui = output_options.open_console("plan")
    request = PlanRequest(
        target,
        overrides=tuple(overrides or ()),
        mesh=mesh,
        devices=devices,
        search=search,
        compile_step=compile_options.compile_step,
        compile_timeout_s=compile_options.compile_timeout,
        html=html,
        config=config,
        offline=offline,
    )
    return ui.finish(run(request, ui))
