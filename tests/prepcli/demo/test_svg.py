"""Charts as SVG text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from prepcli.demo.svg import WIDTH, Bar, stacked_bar


def widths_of_bar(svg: str) -> list[float]:
    """Return the widths of the parts of a stacked bar, without the squares of the legend."""
    return [
        float(width) for width, height in re.findall(r'width="([\d.]+)" height="(\d+)" fill', svg) if height == "28"
    ]


def test_stacked_bar_is_proportional_and_has_a_legend():
    svg = stacked_bar([Bar("a & b", 1, "1 MiB"), Bar("c", 3, "3 MiB")], title="memory")
    ElementTree.fromstring(svg)
    first, second = widths_of_bar(svg)
    assert second == 3 * first
    assert first + second == WIDTH - 40
    assert "a &amp; b: 1 MiB" in svg


def test_stacked_bar_marks_a_limit_beyond_or_within_the_bar():
    parts = [Bar("a", 2, "2")]
    assert sum(widths_of_bar(stacked_bar(parts, Bar("limit", 4, "4")))) == (WIDTH - 40) / 2
    assert sum(widths_of_bar(stacked_bar(parts, Bar("limit", 1, "1")))) == WIDTH - 40
    assert ">limit 4<" in stacked_bar(parts, Bar("limit", 4, "4"))


def test_stacked_bar_of_nothing_is_valid():
    ElementTree.fromstring(stacked_bar([]))
