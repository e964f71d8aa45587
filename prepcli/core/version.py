"""Installed version of prep, which results, manifests and reports name."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Return the installed version of prep."""
    return metadata.version("prepcli")
