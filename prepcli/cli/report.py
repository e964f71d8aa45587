"""The command `prep report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prepcli.cli.option_groups import OutputOptions, expand_option_groups


@expand_option_groups
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders or URLs of training runs.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Write the page to FILE; default: report.html in RUN, or here if RUN is a URL.",
            show_default=False,
        ),
    ] = None,
    *,
    output_options: OutputOptions,
) -> int:
    """Draw the metrics of training runs as one HTML page.

    The page needs no network: curves, recipe, data, environment and checkpoints. Several runs are
    drawn into the same charts, with the differences of their recipes.

    Examples:
      prep report runs/gpt-neo
      prep report runs/a gs://models/b --out compare.html
    """
    from prepcli.operations.report import report as run
    from prepcli.rendering.run_reports import runs_report

    ui = output_options.open_console("report")
    return ui.finish(runs_report(run(runs, out, progress=ui), ui.columns))
