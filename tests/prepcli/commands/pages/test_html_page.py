"""Self-contained HTML pages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from prepcli.commands.pages.html_page import STYLE, html_table, write_html_page
from prepcli.core.errors import PrepError


def test_html_table_escapes_texts_and_aligns_numbers():
    table = "".join(html_table(["part", "bytes"], [("<a>", "1")]))
    assert '<tr><td>&lt;a&gt;</td><td class="n">1</td></tr>' in table


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
        tmp_path / "page.html", names, ["\n", *html_table([names, "n"], [[names, "1"]])]
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
    table = "".join(html_table(["part", "bytes"], [("x" * 500, "1")]))
    assert table.startswith('<div class="scroll"><table>')
    assert ".scroll { overflow-x: auto }" in STYLE
