"""Every public name and recipe key is stable or provisional."""

from __future__ import annotations

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import prepcli
from tools.stability import PROVISIONAL, STABLE
from trainer.recipe.tables import KEY_SCHEMAS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stability.md"
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
    _, _, section = PAGE.read_text().partition("\n## Recipe keys\n")
    patterns = re.findall(r"`(\w+\.[\w*]+)`", section)
    assert patterns
    for pattern in patterns:
        assert any(fnmatch(key, pattern) for key in KEY_SCHEMAS), pattern
