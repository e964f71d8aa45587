"""Curves of runs as SVG text."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.inspection.run_chart import CHART_STYLE, HEIGHT, MAX_DOTS, WIDTH, RunCurve, run_chart, thin_out

FINITE = st.floats(-1e30, 1e30).filter(lambda value: value == 0 or abs(value) > 1e-30)


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def test_axes_have_round_ticks():
    svg = run_chart([RunCurve("a", 0, [(1, 2.31), (480, 5.9)])], "loss")
    assert texts_of(svg) == ["2", "3", "4", "5", "6", "100", "200", "300", "400"]
    small = run_chart([RunCurve("a", 0, [(10_000, 1e-5), (50_000, 3e-5)])], "lr")
    assert texts_of(small)[-5:] == ["10k", "20k", "30k", "40k", "50k"]
    assert texts_of(small)[:2] == ["1.0e-05", "1.5e-05"]


def test_run_of_one_step_has_its_label():
    assert texts_of(run_chart([RunCurve("a", 0, [(7, 0.0)])], "loss")) == ["0", "7"]


@pytest.mark.parametrize(("points", "is_drawn"), [([(7, 2.0)], True), ([(7, 2.0), (9, 2.5)], False)])
def test_single_point_is_drawn_as_a_dot(points: list[tuple[int, float]], is_drawn: bool):
    assert ('class="single"' in run_chart([RunCurve("a", 0, points)], "loss")) == is_drawn
    assert "circle:not(.single, :hover) { fill-opacity: 0 }" in CHART_STYLE


def test_steps_set_the_x_axis():
    svg = run_chart([RunCurve("a", 0, [(7, 2.0), (9, 2.0)])], "loss", (0, 40))
    assert texts_of(svg) == ["2", "0", "10", "20", "30", "40"]
    assert f'points="{52 + 356 * 7 / 40:.1f},' in svg


@given(st.lists(st.tuples(st.integers(0, 10**7), FINITE), min_size=1, max_size=30))
def test_curves_stay_inside_of_the_chart(points: list[tuple[int, float]]):
    svg = run_chart([RunCurve("a", 0, sorted(points))], "x")
    (line,) = re.findall(r'points="(.*?)"', svg)
    for pair in line.split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
        assert math.isfinite(x + y)
    assert len(texts_of(svg)) <= 20
    y_labels = re.findall(r'text-anchor="end">(.*?)<', svg)
    assert len({*y_labels}) == len(y_labels)


@pytest.mark.parametrize(("number", "has_dots"), [(MAX_DOTS, True), (MAX_DOTS + 1, False)])
def test_short_curves_have_tooltips(number: int, has_dots: bool):
    svg = run_chart([RunCurve("a<b", 0, [(step, step / 7) for step in range(number)])], "x")
    assert ("a&lt;b, step 7: 1</title>" in svg) is has_dots


def test_thin_out_keeps_extremes_and_order():
    points = [(step, math.sin(step)) for step in range(10_000)]
    points[1234] = (1234, 50.0)
    thin = thin_out(points, 100)
    assert len(thin) <= 100
    assert (1234, 50.0) in thin
    assert [*thin] == sorted(thin)
    assert thin_out(points[:100], 100) == points[:100]
