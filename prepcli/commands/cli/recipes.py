"""The command `prep recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import complete_shipped_recipe
from prepcli.commands.operations.command_options import RecipesOptions
from prepcli.core.errors import usage_error

COPY = "copy"


@expand_option_groups
def recipes(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[copy] NAME",
            help="A recipe to print or copy. Default: list all.",
            autocompletion=complete_shipped_recipe,
            show_default=False,
        ),
    ] = None,
    *,
    options: RecipesOptions,
    output_options: OutputOptions,
) -> int:
    """List the recipes that prep ships, print or copy one.

    Examples:
      prep recipes
      prep recipes llama-7b
      prep recipes copy llama-7b --out my-run.toml
    """
    from prepcli.commands.operations.recipe_files import shipped_recipe
    from prepcli.commands.operations.recipes import copy_recipe, shipped_recipes
    from prepcli.commands.rendering.recipes import copy_report, recipe_report, recipes_report

    ui = output_options.open_console("recipes")
    out = options["out"]
    is_copy = words is not None and words[0] == COPY
    names = list(words or [])
    if is_copy:
        names.remove(COPY)
    if names[1:]:
        raise usage_error(
            f"unexpected word `{names[1]}`",
            "the command takes the name of one recipe",
            f"`prep recipes copy {names[1]}`",
        )
    if is_copy and not names:
        raise usage_error(
            "no recipe was given", "`prep recipes` lists them", "`prep recipes copy NAME`"
        )
    if out is not None and not is_copy:
        raise usage_error(
            "`--out` requires `copy`",
            "it names the file of the copy",
            "`prep recipes copy NAME --out FILE`",
        )
    if not names:
        return ui.finish(recipes_report(shipped_recipes(), ui.columns))
    path = shipped_recipe(names[0])
    if is_copy:
        return ui.finish(
            copy_report(path.stem, copy_recipe(names[0], None if out is None else Path(out)))
        )
    return ui.finish(recipe_report(path))
