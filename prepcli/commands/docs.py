"""`prep docs`: the pages of the documentation, which prep ships."""

from __future__ import annotations

from pathlib import Path

from prepcli.console.ui import Report, Ui, format_table
from prepcli.errors import usage_error
from trainer.models.suggest import did_you_mean_start

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".md"


def docs(name: str | None, ui: Ui, *, path_only: bool = False) -> Report:
    """Print a page, or list the pages.

    Args:
        name: Name of the page's file without `.md`, with or without its folder; None lists all pages.
        ui: Receives the path of the page.
        path_only: Report the path of the page, or of the folder of all pages, instead of the text.

    Raises:
        UsageError: No page has this name.
    """
    folder = docs_folder()
    if name is not None:
        path = _find_page(name)
        text = path.read_text("utf-8")
        fields = {"name": path.stem, "path": str(path), "text": text}
        if path_only:
            return Report(str(path), fields)
        ui.note(str(path))
        return Report(text.rstrip("\n"), fields)
    pages = _pages()
    entries = [
        {"name": key, "path": str(path), "title": _title(path)} for key, path in pages.items()
    ]
    if path_only:
        return Report(str(folder), {"path": str(folder), "pages": entries})
    rows = [(key, _section(path), _title(path)) for key, path in pages.items()]
    table = format_table(rows, ("page", "section", "title"), width=ui.columns, wrapped=("title",))
    return Report(table, {"path": str(folder), "pages": entries})


def page_names() -> list[str]:
    """Return the names of the pages, in the order of the list."""
    return [*_pages()]


def docs_folder() -> Path:
    """Return the folder of the pages: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_docs"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def _find_page(name: str) -> Path:
    """Return the path of a page by its name, such as `train`, `how-to/train` or `docs/how-to/train.md`."""
    pages = _pages()
    *folders, stem = name.removesuffix(SUFFIX).split("/")
    path = pages.get(stem)
    section = "/".join(folders).removeprefix("docs").strip("/")
    if path is None or section not in ("", _section(path)):
        hint = did_you_mean_start(stem, pages) or "`prep docs` lists the pages"
        raise usage_error(f"unknown page `{name}`", f"there are {len(pages)} pages", hint)
    return path


def _pages() -> dict[str, Path]:
    """Return the pages by the names of their files: pages outside of sections first, then section by section."""
    folder = docs_folder()
    paths = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: (path.parent != folder, path))
    return {path.stem: path for path in paths}


def _section(path: Path) -> str:
    """Return the folder of a page. It is empty for a page outside of sections."""
    return "" if path.parent == docs_folder() else path.parent.name


def _title(path: Path) -> str:
    """Return the heading of a page."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
