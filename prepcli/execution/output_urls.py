"""URLs of outputs in buckets."""

from __future__ import annotations

from pathlib import Path

from prepcli.core.errors import usage_error
from prepcli.stores.addresses import ObjectStoreUrl, is_url, parse_url

RETRIES = 10  # of obstore, for each request


def parse_out_url(path: Path | None) -> ObjectStoreUrl | None:
    """Return the URL given as a path, such as `--out`, or None for a local path.

    `Path` collapses the `//` of a URL to `/`. This function restores it.

    Raises:
        UsageError: The scheme is not supported, or the bucket or path is invalid.
    """
    if path is None:
        return None
    scheme, colon, rest = path.as_posix().partition(":/")
    url = f"{scheme}://{rest}"
    if not colon or not is_url(url):
        return None
    return parse_url(url)


def check_local_path(path: Path | None) -> None:
    """Raise UsageError if the path of tokens, a page or another small output is a URL."""
    url = parse_out_url(path)
    if url is not None:
        why = "only checkpoints and training runs are written to buckets"
        raise usage_error(f"cannot write {url}", why, "name a local path, then copy the result")
