"""Generated pages: the public API, the families, the picture of the packages, and stable names."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import prepcli
from prepcli.core.option_spec import option_specs
from prepcli.models.registry import FAMILIES
from tests.test_imports import ORDER
from tools.api_page import api_page
from tools.families_page import families_page
from tools.import_graph import package_graph, read_graph
from tools.package_diagram import draw, layer_numbers, reachable, transitive_reduction
from tools.stability import PROVISIONAL, STABLE
from trainer.recipe.tables import KEY_SCHEMAS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
NAMES = [name for name in prepcli.__all__ if name != "__version__"]


def test_page_is_up_to_date():
    assert PAGE.read_text() == api_page(), "python -m tools.api_page > docs/reference/api.md"


def section(name: str) -> str:
    """Return the section of a public name."""
    _, heading, rest = PAGE.read_text().partition(f"\n### `{name}`\n")
    assert heading, name
    return rest.partition("\n### ")[0]


@pytest.mark.parametrize("name", NAMES)
def test_page_has_the_docstring_of_each_public_name(name: str):
    value = getattr(prepcli, name)
    first_line = (value.__doc__ or "").splitlines()[0]
    assert first_line
    assert first_line in section(name)


@pytest.mark.parametrize("name", NAMES)
def test_page_has_the_mark_of_each_public_name(name: str):
    mark = "Stable" if name in STABLE else "Provisional"
    assert section(name).startswith(f"\n*{mark}.*\n")


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("Options")])
def test_page_has_every_option(name: str):
    """An option is in the section of its class, or of a class that it includes."""
    texts = [section(name)]
    for text in texts:
        _, _, included = text.partition("\nIncludes ")
        texts += map(section, re.findall(r"`(\w+)`", included))
    for option in option_specs(getattr(prepcli, name)):
        assert any(f"\n{option}: " in text for text in texts), option


@pytest.mark.parametrize(
    "name", [name for name in NAMES if inspect.isfunction(getattr(prepcli, name))]
)
def test_page_has_every_parameter_in_the_signature(name: str):
    signature = section(name).split("```")[1]
    for parameter in inspect.signature(getattr(prepcli, name)).parameters.values():
        assert f"{parameter.name}: {parameter.annotation}" in signature


def test_sections_of_docstrings_are_lists():
    text = section("load_params")
    assert "\n**Args:**\n\n- `checkpoint`: Folder, alias" in text
    assert "\n**Returns:** Nested dict of arrays, " in text
    assert "\n**Raises:**\n\n- `UsageError`: An argument is invalid" in text
    for heading in ("Args:", "Returns:", "Raises:", "Attributes:"):
        assert f"\n{heading}\n" not in PAGE.read_text()


ROOT = Path(__file__).parents[2]
FAMILIES_PAGE = ROOT / "docs" / "reference" / "families.md"


def test_page_of_families_is_up_to_date():
    assert FAMILIES_PAGE.read_text() == families_page(), (
        "python -m tools.families_page > docs/reference/families.md"
    )


def test_page_lists_every_family():
    for name in FAMILIES:
        assert f"| `{name}` |" in FAMILIES_PAGE.read_text()


def test_readme_counts_the_families():
    assert f"[{len(FAMILIES)} model types]" in (ROOT / "README.md").read_text()


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


STABILITY_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stability.md"
STABLE_FUNCTIONS = [name for name in sorted(STABLE) if inspect.isfunction(getattr(prepcli, name))]


def test_each_public_name_has_one_mark():
    assert {*prepcli.__all__} == STABLE | PROVISIONAL
    assert not STABLE & PROVISIONAL


@pytest.mark.parametrize("name", STABLE_FUNCTIONS)
def test_stable_function_has_stable_options_and_result(name: str):
    signature = inspect.signature(getattr(prepcli, name))
    options = signature.parameters.get("options")
    texts = [str(signature.return_annotation), str(options.annotation) if options else ""]
    assert not PROVISIONAL.intersection(re.findall(r"\w+", " ".join(texts)))


def test_provisional_recipe_keys_exist():
    _, _, section = STABILITY_PAGE.read_text().partition("\n## Recipe keys\n")
    patterns = re.findall(r"`(\w+\.[\w*]+)`", section)
    assert patterns
    for pattern in patterns:
        assert any(fnmatch(key, pattern) for key in KEY_SCHEMAS), pattern
