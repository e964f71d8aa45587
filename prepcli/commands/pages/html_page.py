"""Self-contained HTML pages: one style, no scripts, no network."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from prepcli.commands.pages.charts import CHART_STYLE
from prepcli.core.errors import PrepError
from prepcli.core.formatting import printable
from prepcli.core.tables import Block, Cell, Table
from prepcli.stores.addresses import check_local_path
from prepcli.stores.files import (
    check_parent_folder,
    check_replaceable,
    io_error,
    open_regular_file,
    write_file,
)

_START = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
GENERATOR = '<meta name="generator" content="prep">'
# First bytes of every page of prep. Pages of earlier versions have no generator.
PAGE_STARTS = (f"{_START}{GENERATOR}<title>".encode(), f"{_START}<title>prep ".encode())

STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
h1, h2, h3, p, summary {{ overflow-wrap: anywhere }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; vertical-align: top }}
td.n, th.n {{ text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }}
code {{ font-size: 13px }}
.scroll {{ overflow-x: auto }}
svg {{ max-width: 100%; height: auto; font: 12px system-ui, sans-serif }}
{CHART_STYLE}"""


def write_html_page(path: Path, title: str, body: Iterable[str], *, style: str = "") -> None:
    """Write a page of HTML elements. Only an earlier page of prep is replaced.

    Args:
        path: The file.
        title: Title of the page.
        body: The elements.
        style: Further CSS rules.

    Raises:
        PrepError: The file cannot be written, or the path is something other than a page of prep.
    """
    check_page_path(path)
    elements = "\n".join(body)
    page = (
        f"{_START}{GENERATOR}<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n<body>\n{elements}\n</body></html>\n"
    )
    try:
        # Names in the text may have control characters, and bytes that are not UTF-8.
        write_file(path, printable(page).encode())
    except OSError as error:
        raise io_error(path, error) from error


def check_page_path(path: Path) -> None:
    """Check that `write_html_page` may write a page. Call it before computing the content.

    Raises:
        PrepError: The path is a URL or a link, is not a regular file, or is a file other than a page of prep. Or its
            folder does not exist.
    """
    check_local_path(path)
    check_parent_folder(path)
    # Only the first bytes are read: a file of the user may have any size.
    max_nbytes = max(map(len, PAGE_STARTS))
    try:
        check_replaceable(path)
        with open_regular_file(path) as file:
            start = file.read(max_nbytes)
    except FileNotFoundError:
        return
    except OSError as error:
        raise io_error(path, error) from error
    # An empty file, as `mktemp` makes it, has no content to lose.
    if start and not start.startswith(PAGE_STARTS):
        raise PrepError(
            f"{path} is not overwritten",
            "it is not a page of prep",
            "use another name, or remove it",
        )


def html_blocks(blocks: Iterable[Block]) -> Iterator[str]:
    """Yield tables as tables, and each other block as a paragraph."""
    for block in blocks:
        if isinstance(block, Table):
            yield from html_table(block.header, block.rows)
        elif block:
            yield f"<p>{escape(block)}</p>"


class Markup(str):
    """HTML of a cell. Other texts are escaped."""


def html_table(
    header: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    has_numbers: bool = True,
    highlighted: Collection[int] = (),
) -> Iterator[str]:
    """Yield a table. A wide table scrolls on narrow screens.

    Args:
        header: Names of the columns.
        rows: The cells.
        has_numbers: Right-align all columns after the first.
        highlighted: Numbers of the rows with the class `changed`.

    >>> "".join(html_table(["part", "bytes"], [["a < b", "1"]])).partition("</tr>")[2]
    '<tr><td>a &lt; b</td><td class="n">1</td></tr></table></div>'
    """
    look = ' class="n"' if has_numbers else ""

    def cells(tag: str, values: Sequence[Cell]) -> str:
        elements: list[str] = []
        for number, value in enumerate(values):
            text = f"{value:,}" if isinstance(value, int) else value
            content = text if isinstance(text, Markup) else escape(text)
            elements.append(f"<{tag}{look if number else ''}>{content}</{tag}>")
        return "".join(elements)

    yield f'<div class="scroll"><table><tr>{cells("th", header)}</tr>'
    for number, row in enumerate(rows):
        attribute = ' class="changed"' if number in highlighted else ""
        yield f"<tr{attribute}>{cells('td', row)}</tr>"
    yield "</table></div>"
