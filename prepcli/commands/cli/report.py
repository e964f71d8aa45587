"""The command `prep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.operations.command_options import ReportOptions


@expand_option_groups
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders or URLs of training runs.", show_default=False
        ),
    ],
    *,
    options: ReportOptions,
    output_options: OutputOptions,
) -> int:
    """Draw the metrics of training runs as one HTML page.

    The page needs no network: curves, recipe, data, environment and checkpoints. Several runs are
    drawn into the same charts, with the differences of their recipes.

    Examples:
      prep report runs/gpt-neo
      prep report runs/a gs://models/b --out compare.html
    """
    from prepcli.commands.operations.report import report as run
    from prepcli.commands.rendering.run_reports import runs_report

    ui = output_options.open_console("report")
    return ui.finish(runs_report(run(runs, **options, progress=ui), ui.columns))
