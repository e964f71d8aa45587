"""Common options and arguments of several commands, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.console.progress_displays import Mode


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return the aliases, and the folders here with a prep manifest, with the prefix `incomplete`."""
    from prepcli.formats.manifest import MANIFEST_FILE
    from prepcli.sources.aliases import ALIASES_BY_NAME

    folders = [path.parent.name for path in Path().glob(f"*/{MANIFEST_FILE}")]
    return [name for name in [*sorted(folders), *ALIASES_BY_NAME] if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Return the families of the aliases with the prefix `incomplete`."""
    from prepcli.sources.aliases import ALIAS_FAMILIES

    return [name for name in ALIAS_FAMILIES if name.startswith(incomplete)]


def complete_shipped_recipe(incomplete: str) -> list[str]:
    """Return the names of the shipped recipes with the prefix `incomplete`."""
    from prepcli.commands.operations.recipes import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the TOML files here, and the shipped recipes, with the prefix `incomplete`."""
    files = sorted(path.name for path in Path().glob("*.toml"))
    return [
        *(name for name in files if name.startswith(incomplete)),
        *complete_shipped_recipe(incomplete),
    ]


def complete_recipe_or_checkpoint(incomplete: str) -> list[str]:
    """Return the recipes and the checkpoints with the prefix `incomplete`."""
    names = [*complete_recipe(incomplete), *complete_checkpoint(incomplete)]
    # A folder may have the name of a recipe. The shell would offer it twice.
    return [*dict.fromkeys(names)]


def complete_page(incomplete: str) -> list[str]:
    """Return the pages of the documentation with the prefix `incomplete`."""
    from prepcli.commands.operations.docs import page_names

    return [name for name in page_names() if name.startswith(incomplete)]


def complete_devices(incomplete: str) -> list[str]:
    """Return the kinds of accelerators with the prefix `incomplete`, in any case."""
    from trainer.planning.accelerators import ACCELERATORS

    return [name for name in ACCELERATORS if name.lower().startswith(incomplete.lower())]


CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias (see: prep models) or hub id.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
OptionalCheckpointArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Folder, alias or hub id. Default: the only prep folder here.",
        autocompletion=complete_checkpoint,
        show_default=False,
    ),
]
FamilyArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FAMILY",
        help="List only this family.",
        autocompletion=complete_family,
        show_default=False,
    ),
]

# All commands
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="Print errors only.")]
VerboseOption = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Print one line per leaf. -vv: one per slab.",
        show_default=False,
    ),
]

# Long-running commands
ProgressOption = Annotated[
    Mode,
    typer.Option(
        "--progress",
        metavar="MODE",
        envvar="PREP_PROGRESS",
        help="Show progress as auto, bar, lines, json or none.",
    ),
]
