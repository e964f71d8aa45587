"""Self-contained HTML pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.inspection.html_page import html_table, write_html_page


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
