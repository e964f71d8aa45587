"""Put a family with a mistake in place of the right one."""

from __future__ import annotations

import pytest

from prepcli.models import registry
from prepcli.models.parameters import Family


def use_family(wrong: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry return another family for its model type."""
    find = registry._declared_family
    monkeypatch.setattr(
        registry, "_declared_family", lambda name: wrong if name == wrong.name else find(name)
    )
