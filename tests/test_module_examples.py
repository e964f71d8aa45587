"""The examples in docstrings of index algebra, models, plans and recipes."""

from __future__ import annotations

import doctest
import importlib

import pytest

from tools.import_graph import module_paths, package_of

PACKAGES = (
    "prepcli.algebra",
    "prepcli.core",
    "prepcli.models",
    "trainer.planning",
    "trainer.recipe",
)
MODULES = sorted(
    module
    for module, path in module_paths().items()
    if package_of(module) in PACKAGES and ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_module_hold(name: str):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
