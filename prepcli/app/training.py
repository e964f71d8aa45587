"""`prep train` as Typer takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.app.groups import Shown, grouped
from prepcli.app.options import DryRun, Offline, ProgressMode
from prepcli.errors import usage


@grouped
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="A TOML file; docs/recipes.md has its keys.", show_default=False),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Another value for a key, as train.steps=10.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="RUN", help="The run's folder; default: runs/NAME.", show_default=False),
    ] = None,
    stop_after: Annotated[
        int, typer.Option("--stop-after", metavar="STEPS", min=0, help="Stop and save after so many steps; 0: never.")
    ] = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Drop the run's steps and begin anew.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes.")] = False,
    dry_run: DryRun = False,
    offline: Offline = False,
    *,
    shown: Shown,
    progress: ProgressMode = "auto",
) -> int:
    """Train from a checkpoint as a recipe says; resumes by itself.

    \b
    Examples:
      prep train recipes/gpt-neo-1.3b.toml
      prep train recipe.toml --set optimizer.lr=1e-5 --set mesh=1,2,4
      prep train recipe.toml --dry-run
    """
    from prepcli.commands.train import Request, recipe_schema
    from prepcli.commands.train import train as run

    ui = shown.open("train", progress)
    if schema:
        return ui.finish(recipe_schema())
    if recipe is None:
        raise usage("no recipe was named", "training is described by a TOML file", "`prep train RECIPE`")
    return ui.finish(run(Request(recipe, tuple(sets or ()), out, restart, stop_after, dry_run, offline), ui))
