"""The reference page of the public API, generated from docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import prepcli
from prepcli.core.option_spec import option_specs
from tools.api_page import api_page
from tools.stability import STABLE

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
