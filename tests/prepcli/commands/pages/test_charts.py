"""Charts as SVG elements."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
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
