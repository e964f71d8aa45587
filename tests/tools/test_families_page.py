"""The reference page of the model families, generated from the registry."""

from __future__ import annotations

from pathlib import Path

from prepcli.models.registry import FAMILIES
from tools.families_page import families_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "families.md"


def test_page_is_up_to_date():
    assert PAGE.read_text() == families_page(), (
        "python -m tools.families_page > docs/reference/families.md"
    )


def test_page_lists_every_family():
    for name in FAMILIES:
        assert f"| `{name}` |" in PAGE.read_text()


def test_readme_counts_the_families():
    assert f"[{len(FAMILIES)} model types]" in (ROOT / "README.md").read_text()
