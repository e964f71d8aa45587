"""The picture of the packages: current, complete, and without an upward arrow."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_imports import ORDER
from tools.import_graph import package_graph, read_graph
from tools.package_diagram import draw, layer_numbers, reachable, transitive_reduction

PICTURE = Path(__file__).parents[2] / "docs" / "explanation" / "packages.svg"
# This is no package. `package_graph` leaves it out.
MODULES = {"prepcli.__main__"}
CHAIN = {
    "prepcli.a": {"prepcli.b", "trainer.c"},
    "prepcli.b": {"trainer.c"},
    "trainer.c": set[str](),
}
ARROW = re.compile(r'<polyline points="([^"]*)" data-from="([^"]*)" data-to="([^"]*)"/>')


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    return package_graph(read_graph())


def test_picture_is_up_to_date(imports: dict[str, set[str]]):
    assert PICTURE.read_text() == draw(imports), (
        "python -m tools.package_diagram > docs/explanation/packages.svg"
    )


def test_picture_has_every_package_once():
    names = re.findall(r"<text [^>]*>([^<]*)</text>", PICTURE.read_text())
    assert sorted(names) == sorted({*ORDER} - MODULES)


def test_arrows_point_down():
    arrows = ARROW.findall(PICTURE.read_text())
    assert arrows
    for points, *_ in arrows:
        heights = [int(point.partition(",")[2]) for point in points.split()]
        assert heights == sorted(heights)
        assert heights[0] < heights[-1]


def test_arrows_stand_for_the_imports_and_no_others(imports: dict[str, set[str]]):
    drawn: dict[str, set[str]] = {package: set() for package in imports}
    for _, upper, lower in ARROW.findall(PICTURE.read_text()):
        drawn[upper].add(lower)
    for package, names in imports.items():
        assert drawn[package] <= names
        assert reachable(drawn, package) == reachable(imports, package)


def test_transitive_reduction_omits_implied_imports():
    assert transitive_reduction(CHAIN) == {
        "prepcli.a": {"prepcli.b"},
        "prepcli.b": {"trainer.c"},
        "trainer.c": set(),
    }


def test_layers_follow_the_longest_path():
    assert layer_numbers(CHAIN) == {"prepcli.a": 0, "prepcli.b": 1, "trainer.c": 2}
