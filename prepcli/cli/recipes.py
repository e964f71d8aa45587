"""The command `prep recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups


@expand_option_groups
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A recipe to print; default: list all.", show_default=False)
    ] = None,
    *,
    output_options: OutputOptions,
) -> int:
    """List the recipes that prep ships, or print one.

    Examples:
      prep recipes
      prep recipes llama-7b > my-run.toml
    """
    from prepcli.commands.recipes import recipes as run

    ui = output_options.open_console("recipes")
    return ui.finish(run(name, ui.columns))
