"""Put a family with a mistake in place of the right one."""

from __future__ import annotations

import importlib

import pytest

from prepcli.models.parameters import Family
from prepcli.models.registry import MODEL_TYPES


def use_family(wrong: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry return another family for its model type."""
    kin = importlib.import_module(f"prepcli.models.families.{MODEL_TYPES[wrong.name]}")
    monkeypatch.setitem(kin.FAMILIES, wrong.name, wrong)
