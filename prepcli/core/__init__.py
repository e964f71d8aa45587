"""Errors, JSON values, texts, and the protocols of progress and of processes."""

from importlib import metadata


def version() -> str:
    """Return the installed version of prep, which results, manifests and reports name."""
    return metadata.version("prepcli")
