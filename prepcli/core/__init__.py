"""Errors, JSON values, texts, the protocols of progress and of processes, and the versions of packages."""

from functools import cache

PACKAGES = (
    "prepcli", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "safetensors", "numpy", "ml_dtypes",
    "huggingface_hub", "tokenizers", "typer", "rich", "transformers", "torch",
)  # fmt: skip


def version() -> str:
    """Return the installed version of prep, which results, manifests and reports name."""
    # It imports the parsers of e-mails, which a child process of the sandbox does not need.
    from importlib import metadata

    return metadata.version("prepcli")


def package_versions() -> dict[str, str | None]:
    """Return the version of each package of prep, or None if it is not installed."""
    return {name: _package_version(name) for name in PACKAGES}


# An installed version does not change while a process runs, and parsing its metadata takes a millisecond.
@cache
def _package_version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
