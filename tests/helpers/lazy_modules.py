"""Optional packages that are slow to import, imported when a test uses them and not when tests are collected."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class _LazyModule:
    """A module that is imported when an attribute of it is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest reads `__test__` and `_mock_name` of every name in a test module.
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy_module(name: str) -> Any:
    """Return a module that is imported at its first use; skip the calling test module if it is not installed."""
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
    return _LazyModule(name)
