"""Pages of the documentation as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prepcli.commands.console.ui import Report, Ui
from prepcli.commands.operations.docs import DocsPage
from prepcli.core.tables import format_table


def page_report(path: Path, ui: Ui, *, path_only: bool) -> Report:
    """Return the text of a page.

    Args:
        path: File of the page.
        ui: Receives the path.
        path_only: Return the path instead of the text.
    """
    text = path.read_text("utf-8")
    fields = {"name": path.stem, "path": str(path), "text": text}
    if path_only:
        return Report(str(path), fields)
    ui.note(str(path))
    return Report(text.rstrip("\n"), fields)


def pages_report(
    pages: Sequence[DocsPage], folder: Path, columns: int | None, *, path_only: bool
) -> Report:
    """Return the table of the pages.

    Args:
        pages: The pages.
        folder: Folder of all pages.
        columns: Width of the terminal. None means unlimited.
        path_only: Return the folder instead of the table.
    """
    rows: list[tuple[str, str, str]] = []
    entries: list[dict[str, str]] = []
    for page in pages:
        name = page.path.stem
        rows.append((name, page.section, page.title))
        entries.append({"name": name, "path": str(page.path), "title": page.title})
    fields = {"path": str(folder), "pages": entries}
    if path_only:
        return Report(str(folder), fields)
    header = ("page", "section", "title")
    return Report(format_table(rows, header, width=columns, wrapped=("title",)), fields)
