"""Find the pages of the documentation, which prep ships."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Command, text, usage_error
from prepcli.core.formatting import did_you_mean_start

PACKAGE = Path(__file__).parents[2]
SUFFIX = ".md"


@dataclass(frozen=True, slots=True)
class DocsPage:
    """A page of the documentation.

    Attributes:
        path: Its file. The name of the page is that of the file, without `.md`.
        section: Its folder. Empty for a page outside of sections.
        title: Its heading.
    """

    path: Path
    section: str
    title: str


def list_pages() -> list[DocsPage]:
    """Return the pages: those outside of sections first, then section by section."""
    return [
        DocsPage(path, _page_section(path), _page_title(path)) for path in _page_paths().values()
    ]


def page_names() -> list[str]:
    """Return the names of the pages, in the order of the list."""
    return [*_page_paths()]


def docs_folder() -> Path:
    """Return the folder of the pages: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_docs"
    return installed if installed.is_dir() else PACKAGE.parent / "docs"


def find_page(name: str) -> Path:
    """Return the path of a page by its name, such as `train`, `how-to/train` or `docs/how-to/train.md`.

    Raises:
        UsageError: No page has this name.
    """
    pages = _page_paths()
    *folders, stem = name.removesuffix(SUFFIX).split("/")
    path = pages.get(stem)
    section = "/".join(folders).removeprefix("docs").strip("/")
    if path is None or section not in ("", _page_section(path)):
        # The name of a page of another section needs no other suggestions.
        candidates = [stem] if path else pages
        hint = did_you_mean_start(stem, candidates) or text("{} lists the pages", Command("docs"))
        raise usage_error(f"unknown page `{name}`", f"there are {len(pages)} pages", hint)
    return path


def _page_paths() -> dict[str, Path]:
    """Return the pages by the names of their files: pages outside of sections first, then section by section."""
    folder = docs_folder()
    paths = sorted(folder.rglob(f"*{SUFFIX}"), key=lambda path: (path.parent != folder, path))
    return {path.stem: path for path in paths}


def _page_section(path: Path) -> str:
    """Return the folder of a page. It is empty for a page outside of sections."""
    return "" if path.parent == docs_folder() else path.parent.name


def _page_title(path: Path) -> str:
    """Return the heading of a page."""
    with path.open(encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip()
