"""Self-contained HTML pages, and charts as SVG elements."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.commands.pages.charts import (
    CHART_STYLE,
    MAX_DOTS,
    SMALL,
    WIDE,
    Curve,
    line_chart,
    thin_out,
)
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


FINITE = st.floats(-1e30, 1e30).filter(lambda value: value == 0 or abs(value) > 1e-30)


def small_chart(
    points: Sequence[tuple[float, float]],
    *,
    name: str = "a",
    x_range: tuple[float, float] | None = None,
) -> str:
    curve = Curve(name=name, points=points)
    return line_chart([curve], "loss", size=SMALL, x_range=x_range, x_name="step", has_legend=False)


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def test_axes_have_round_ticks():
    svg = small_chart([(1, 2.31), (480, 5.9)])
    assert texts_of(svg) == ["step", "2", "3", "4", "5", "6", "100", "200", "300", "400"]
    small = small_chart([(10_000, 1e-5), (50_000, 3e-5)])
    assert texts_of(small)[-5:] == ["10k", "20k", "30k", "40k", "50k"]
    assert texts_of(small)[1:3] == ["1.0e-05", "1.5e-05"]


def test_names_of_axes_are_above_and_below_the_plot():
    root = ElementTree.fromstring(
        line_chart([Curve(name="a", points=[(0, 1.0), (9, 2.0)])], "x", x_name="s", y_name="GiB")
    )
    y_of = {element.text: float(element.get("y", "nan")) for element in root.iter("text")}
    assert y_of["GiB"] < y_of["2.0"] < y_of["1.0"] < y_of["0"] < y_of["s"] < WIDE[1]


def test_chart_of_one_step_labels_it():
    assert texts_of(small_chart([(7, 0.0)])) == ["step", "0", "7"]


@pytest.mark.parametrize(
    ("points", "is_drawn"), [([(7, 2.0)], True), ([(7, 2.0), (9, 2.5)], False)]
)
def test_single_point_is_drawn_as_a_dot(points: list[tuple[int, float]], is_drawn: bool):
    assert ('class="single"' in small_chart(points)) == is_drawn
    assert "circle:not(.single, :hover) { fill-opacity: 0 }" in CHART_STYLE


def test_steps_set_the_x_axis():
    svg = small_chart([(7, 2.0), (9, 2.0)], x_range=(0, 40))
    assert texts_of(svg) == ["step", "2", "0", "10", "20", "30", "40"]
    assert f'points="{52 + 356 * 7 / 40:.1f},' in svg


@given(st.lists(st.tuples(st.integers(0, 10**7), FINITE), min_size=1, max_size=30))
def test_curves_stay_inside_of_the_chart(points: list[tuple[int, float]]):
    svg = small_chart(sorted(points))
    (line,) = re.findall(r'points="(.*?)"', svg)
    for pair in line.split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= SMALL[0]
        assert 0 <= y <= SMALL[1]
        assert math.isfinite(x + y)
    assert len(texts_of(svg)) <= 20
    y_labels = re.findall(r'text-anchor="end">(.*?)<', svg)
    assert len({*y_labels}) == len(y_labels)


def test_legend_and_marks_name_curves_and_lines():
    curves = [
        Curve(name="a", points=[(0, 1.0), (2, 3.0)]),
        Curve(name="b", points=[(0, 2.0)], color=1),
    ]
    svg = line_chart(curves, "loss", marks=[(1.0, "saved")])
    assert {"a", "b", "saved"} <= {*texts_of(svg)}
    assert re.findall(r'<polyline .*?stroke="(.*?)"', svg) == ["var(--color0)", "var(--color1)"]
    assert "--color0: #" in CHART_STYLE


def test_chart_from_zero_has_the_origin():
    svg = line_chart([Curve(name="a", points=[(4, 4.0), (8, 9.0)])], "x", from_zero=True)
    assert texts_of(svg) == ["0", "2", "4", "6", "8", "10", "0", "2", "4", "6", "8", "a"]


def test_logarithmic_axes_have_equal_steps_for_equal_ratios():
    points = [(1.0, 10.0), (10.0, 100.0), (100.0, 1000.0)]
    svg = line_chart([Curve(name="a", points=points)], "x", is_log=True)
    (line,) = re.findall(r'points="(.*?)"', svg)
    positions = [tuple(map(float, pair.split(","))) for pair in line.split()]
    (x0, y0), (x1, y1), (x2, y2) = positions
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.15)
    assert y1 - y0 == pytest.approx(y2 - y1, abs=0.15)
    assert {"1", "10", "100"} <= {*texts_of(svg)}


def test_chart_without_points_is_empty():
    assert line_chart([Curve(name="a", points=[])], "x") == ""


@pytest.mark.parametrize(("number", "has_dots"), [(MAX_DOTS, True), (MAX_DOTS + 1, False)])
def test_short_curves_have_tooltips(number: int, has_dots: bool):
    svg = small_chart([(step, step / 7) for step in range(number)], name="a<b")
    assert ("a&lt;b, step 7: 1</title>" in svg) is has_dots


def test_thin_out_keeps_extremes_and_order():
    points = [(step, math.sin(step)) for step in range(10_000)]
    points[1234] = (1234, 50.0)
    thin = thin_out(points, 100)
    assert len(thin) <= 100
    assert (1234, 50.0) in thin
    assert [*thin] == sorted(thin)
    assert thin_out(points[:100], 100) == points[:100]


def test_legend_has_a_piece_of_the_line_before_each_name():
    curves = [
        Curve(name="peak", points=[(0, 1.0), (2, 3.0)]),
        Curve(name="limit", points=[(0, 3.0), (2, 3.0)], color=1),
    ]
    root = ElementTree.fromstring(line_chart(curves, "memory"))
    first_line = min(float(y) for y in re.findall(r",([\d.]+)", points_of(root)[1]))
    for number, name in enumerate(("peak", "limit")):
        (label,) = [element for element in root.iter("text") if element.text == name]
        (piece,) = [
            element.get("d", "")
            for element in root.iter("path")
            if element.get("stroke") == f"var(--color{number})"
        ]
        start_x, y = map(float, re.findall(r"[\d.]+", piece)[:2])
        assert start_x < float(label.get("x", "nan"))
        # No curve passes through the legend.
        assert y < float(label.get("y", "nan")) < first_line


def points_of(root: ElementTree.Element) -> list[str]:
    return [element.get("points", "") for element in root.iter("polyline")]


def test_texts_at_the_borders_are_not_cut():
    svg = line_chart(
        [Curve(name="a", points=[(0, 1.0), (1_000_000, 2.0)])],
        "x",
        marks=[(1_000_000, "the last step of this run")],
    )
    root = ElementTree.fromstring(svg)
    (mark,) = [e for e in root.iter("text") if (e.text or "").startswith("the last")]
    assert (mark.get("text-anchor"), mark.get("x")) == ("end", f"{WIDE[0]:.1f}")
