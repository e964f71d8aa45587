"""Self-contained HTML pages: one style, no scripts, no network."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from prepcli.commands.pages.charts import CHART_STYLE, color_of
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
.chip {{ display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .4em }}
.legend {{ display: flex; flex-wrap: wrap; gap: 0 1.5rem; margin: .2rem 0 }}
.stack {{ display: flex; height: 1.8rem; position: relative; background: #8882 }}
.stack i {{ height: 100%; opacity: .8 }}
.stack b {{ position: absolute; top: -.3rem; bottom: -.3rem; border-right: 2px solid }}
.bars td:last-child {{ width: 60% }}
.bars i {{ display: block; height: 1.2rem; opacity: .8 }}
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
            yield from html_table(block)
        elif block:
            yield f"<p>{escape(block)}</p>"


class Markup(str):
    """HTML of a cell. Other texts are escaped."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its name, its length, and the text of its value."""

    name: str
    value: float
    text: str


def chip(number: int) -> str:
    """Return a square in the colour with this number, for the name of a curve or of a part."""
    return f'<span class="chip" style="background:{color_of(number)}"></span>'


def legend(texts: Sequence[str]) -> str:
    """Return texts side by side, each after a square in its colour. They wrap on narrow screens."""
    items = [f"<span>{chip(number)}{escape(text)}</span>" for number, text in enumerate(texts)]
    return f'<p class="legend">{"".join(items)}</p>'


def stacked_bar(parts: Sequence[Bar], title: str, *, limit: Bar | None = None) -> str:
    """Draw the parts of a total side by side, as wide as the page, and a line at the limit."""
    longest = sum(part.value for part in parts)
    if limit is not None:
        longest = max(longest, limit.value)
    longest = longest or 1
    elements: list[str] = []
    for number, part in enumerate(parts):
        share = f"width:{100 * part.value / longest:.2f}%;background:{color_of(number)}"
        elements.append(f'<i style="{share}" title="{escape(f"{part.name}: {part.text}")}"></i>')
    if limit is not None:
        name = escape(f"{limit.name}: {limit.text}")
        elements.append(f'<b style="left:{100 * limit.value / longest:.2f}%" title="{name}"></b>')
    return f'<div class="stack" role="img" aria-label="{escape(title)}">{"".join(elements)}</div>'


def bar_table(bars: Sequence[Bar], header: tuple[str, str]) -> Iterator[str]:
    """Yield a table of bars: the name, the text of the value, and a bar of its length."""
    longest = max((bar.value for bar in bars), default=0) or 1
    rows: list[list[str]] = []
    for bar in bars:
        look = f"width:{100 * bar.value / longest:.2f}%;background:{color_of(0)}"
        rows.append([bar.name, bar.text, Markup(f'<i style="{look}"></i>')])
    yield '<div class="bars">'
    yield from html_table(Table((*header, ""), rows, right_aligned=header[1:]))
    yield "</div>"


def html_table(table: Table, *, highlighted: Collection[int] = ()) -> Iterator[str]:
    """Yield a table, with the right-aligned columns of a terminal. A wide table scrolls on narrow screens.

    Args:
        table: The table. Its cells may be Markup.
        highlighted: Numbers of the rows with the class `changed`.

    >>> parts = html_table(Table(["part", "bytes"], [["a < b", 1000]]))
    >>> "".join(parts).partition("</tr>")[2]
    '<tr><td>a &lt; b</td><td class="n">1,000</td></tr></table></div>'
    """
    looks: list[str] = []
    for index, name in enumerate(table.header):
        has_integers = all(isinstance(row[index], int) for row in table.rows)
        is_right_aligned = name in table.right_aligned or (has_integers and bool(table.rows))
        looks.append(' class="n"' if is_right_aligned else "")

    def cells(tag: str, values: Sequence[Cell]) -> str:
        elements: list[str] = []
        for look, value in zip(looks, values, strict=True):
            text = f"{value:,}" if isinstance(value, int) else value
            content = text if isinstance(text, Markup) else escape(text)
            elements.append(f"<{tag}{look}>{content}</{tag}>")
        return "".join(elements)

    yield f'<div class="scroll"><table><tr>{cells("th", table.header)}</tr>'
    for number, row in enumerate(table.rows):
        attribute = ' class="changed"' if number in highlighted else ""
        yield f"<tr{attribute}>{cells('td', row)}</tr>"
    yield "</table></div>"
