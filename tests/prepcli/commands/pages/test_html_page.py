"""Self-contained HTML pages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from prepcli.commands.pages.html_page import (
    STYLE,
    Bar,
    bar_table,
    html_table,
    stacked_bar,
    write_html_page,
)
from prepcli.core.errors import PrepError
from prepcli.core.tables import Table


def test_html_table_escapes_texts_and_aligns_numbers():
    rows = [("<a>", "1 B", "x", 2000), ("b", "2 B", "y", 3)]
    table = "".join(html_table(Table(["part", "bytes", "why", "count"], rows, ["bytes"])))
    cells = '<td>&lt;a&gt;</td><td class="n">1 B</td><td>x</td><td class="n">2,000</td>'
    assert f"<tr>{cells}</tr>" in table


def shares_of(html: str, tag: str = "i") -> list[float]:
    """Return the widths of the parts of a bar, or the places of its lines, in percent."""
    return [float(share) for share in re.findall(rf'<{tag} style="(?:width|left):([\d.]+)%', html)]


def test_stacked_bar_is_proportional_and_names_its_parts():
    html = stacked_bar([Bar("a & b", 1, "1 MiB"), Bar("c", 3, "3 MiB")], "memory")
    assert shares_of(html) == [25, 75]
    assert 'title="a &amp; b: 1 MiB"' in html
    assert 'aria-label="memory"' in html


@pytest.mark.parametrize(("limit", "width", "place"), [(4, 50, 100), (1, 100, 50)])
def test_stacked_bar_marks_a_limit(limit: int, width: float, place: float):
    html = stacked_bar([Bar("a", 2, "2")], "x", limit=Bar("limit", limit, str(limit)))
    assert (shares_of(html), shares_of(html, "b")) == ([width], [place])
    assert f'title="limit: {limit}"' in html


def test_bars_of_nothing_are_valid():
    assert shares_of(stacked_bar([], "x")) == []
    assert shares_of("".join(bar_table([Bar("a", 0, "0")], ("part", "bytes")))) == [0]


def test_bar_table_has_names_values_and_bars():
    bars = [Bar("<a>", 1, "1 B"), Bar("b", 2, "2 B")]
    html = "".join(bar_table(bars, ("part", "bytes")))
    assert shares_of(html) == [50, 100]
    assert '<td>&lt;a&gt;</td><td class="n">1 B</td>' in html


def test_html_page_escapes_its_title(tmp_path: Path):
    write_html_page(tmp_path / "page.html", "plan of <x>", ["<p>body</p>"])
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "<title>plan of &lt;x&gt;</title>" in page
    assert "<p>body</p>" in page


def test_html_page_reports_unwritable_files(tmp_path: Path):
    with pytest.raises(PrepError, match="cannot read or write"):
        write_html_page(tmp_path / "none" / "page.html", "x", [])


def test_html_page_escapes_control_characters(tmp_path: Path):
    names = "a\x1b[2J\0\x9b\u202e\udcff"
    write_html_page(
        tmp_path / "page.html", names, ["\n", *html_table(Table([names, "n"], [[names, "1"]]))]
    )
    page = (tmp_path / "page.html").read_text()
    assert page.count("a\\x1b[2J\\x00\\x9b\\u202e\\udcff") == 3
    assert all(char.isprintable() or char == "\n" for char in page)


OLD_PAGE = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>prep demo'
OTHER_FILES = {
    "toml": 'name = "run"\n',
    "html": "<!doctype html>\n<html><head><title>prep</title>",
    "zeros": "\0" * 4096,
}


@pytest.mark.parametrize("content", ["", OLD_PAGE], ids=["empty", "old"])
def test_html_page_replaces_pages_of_earlier_versions(tmp_path: Path, content: str):
    path = tmp_path / "page.html"
    path.write_text(content)
    for title in ("first", "second"):
        write_html_page(path, title, [])
        assert f"<title>{title}</title>" in path.read_text()
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_html_page_replaces_no_other_file(tmp_path: Path, content: str):
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    with pytest.raises(PrepError, match="it is not a page of prep") as error:
        write_html_page(path, "report", [])
    assert error.value.hint == "use another name, or remove it"
    assert path.read_text() == content


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_html_page_replaces_no_link_or_fifo(tmp_path: Path, kind: str):
    path = tmp_path / "page.html"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        write_html_page(tmp_path / "target.html", "old", [])
        path.symlink_to("target.html")
    with pytest.raises(PrepError, match=r"page\.html is not overwritten"):
        write_html_page(path, "new", [])


def test_html_page_follows_links_of_parent_folders(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    for _ in range(2):
        write_html_page(tmp_path / "link" / "page.html", "x", [])
    assert os.listdir(tmp_path / "folder") == ["page.html"]


def test_wide_tables_scroll_and_not_the_page():
    table = "".join(html_table(Table(["part", "bytes"], [("x" * 500, "1")])))
    assert table.startswith('<div class="scroll"><table>')
    assert ".scroll { overflow-x: auto }" in STYLE
