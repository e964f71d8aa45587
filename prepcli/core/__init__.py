"""Errors, JSON values, texts, the protocols of progress and of processes, and the versions of packages."""

from functools import cache

PACKAGES = (
    "prepcli", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "ml_dtypes",
    "huggingface_hub", "tokenizers", "typer", "rich", "transformers", "torch",
)  # fmt: skip
# `pyproject.toml` reads it here. The metadata of the installed package have it too, but the parser of e-mails, which
# reads them, takes 12 ms to import.
VERSION = "0.2.0"


def version() -> str:
    """Return the version of prep, which results, manifests and reports name."""
    return VERSION


def package_versions() -> dict[str, str | None]:
    """Return the version of each package of prep, or None if it is not installed."""
    # The metadata of an editable installation may be those of an earlier version.
    return {name: _package_version(name) for name in PACKAGES} | {"prepcli": VERSION}


# An installed version does not change while a process runs, and parsing its metadata takes a millisecond.
@cache
def _package_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
