"""Errors, JSON values, texts, and the protocols of progress and of processes."""


def version() -> str:
    """Return the installed version of prep, which results, manifests and reports name."""
    # It imports the parsers of e-mails, which a child process of the sandbox does not need.
    from importlib import metadata

    return metadata.version("prepcli")
