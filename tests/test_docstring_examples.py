"""Examples in docstrings: each `>>> ` prints what the docstring says."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest

from tools.import_graph import module_paths

EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)
MODULES = [name for name, path in module_paths().items() if EXAMPLE.search(path.read_text())]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_their_results(name: str):
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert results.failed == 0
    assert results.attempted > 0
