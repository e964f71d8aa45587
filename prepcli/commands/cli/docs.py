"""The command `prep docs`."""

from __future__ import annotations

from typing import Annotated

import typer

from prepcli.commands.cli.option_groups import OutputOptions, expand_option_groups
from prepcli.commands.cli.options import complete_page
from prepcli.commands.operations.command_options import DocsOptions


@expand_option_groups
def docs(
    page: Annotated[
        str | None,
        typer.Argument(
            metavar="PAGE",
            help="Page to print. Default: list all.",
            autocompletion=complete_page,
            show_default=False,
        ),
    ] = None,
    *,
    options: DocsOptions,
    output_options: OutputOptions,
) -> int:
    """List the pages of the documentation, or print one. The path of a page goes to stderr.

    Examples:
      prep docs
      prep docs train | less
      prep docs recipes --path
    """
    from prepcli.commands.operations.docs import docs_folder, find_page, list_pages
    from prepcli.commands.rendering.docs import page_report, pages_report

    ui = output_options.open_console("docs")
    path_only = options["path"]
    if page is not None:
        return ui.finish(page_report(find_page(page), ui, path_only=path_only))
    pages = pages_report(list_pages(), docs_folder(), ui.columns, path_only=path_only)
    return ui.finish(pages)
