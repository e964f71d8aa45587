"""The examples in docstrings of models, planning and recipes."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[3] / "trainer"
MODULES = [
    f"trainer.{package}.{path.stem}"
    for package in ("models", "planning", "recipe")
    for path in sorted((TRAINER / package).glob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_module_hold(name: str):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
