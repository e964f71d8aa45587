"""Addresses of objects: `gs://BUCKET/PATH` and `s3://BUCKET/PATH`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from prepcli.core.errors import usage_error

_URL = re.compile(r"(gs|s3)://([^/]+)(?:/(.*))?", re.DOTALL)
# A superset of the valid names. The store refuses the rest.
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class ObjectStoreUrl:
    """Bucket and key prefix of an object store. `path` has no slash at its ends."""

    scheme: str
    bucket: str
    path: str

    def __str__(self) -> str:
        """Return the URL."""
        return f"{self.scheme}://{self.bucket}/{self.path}".rstrip("/")

    def key(self, path: str) -> str:
        """Return the object key of a file below this URL."""
        if self.path:
            return f"{self.path}/{path}"
        return path


def is_url(text: str) -> bool:
    """Return whether a text has the form of a URL, of a supported scheme or not."""
    return _SCHEME.match(text) is not None


def parse_url(text: str) -> ObjectStoreUrl:
    """Parse `gs://BUCKET/PATH` or `s3://BUCKET/PATH`.

    Raises:
        UsageError: The scheme is not supported, or bucket or path are invalid.
    """
    match = _URL.fullmatch(text.rstrip("/"))
    hint = "for example gs://BUCKET/PATH"
    if match is None:
        why = "supported: gs://BUCKET/PATH and s3://BUCKET/PATH"
        raise usage_error(f"`{text}` is an invalid URL", why, hint)
    if not _BUCKET_NAME.fullmatch(match[2]):
        why = (
            f"{match[2]!a:.80} is not a valid bucket name, which has 3 to 63 lower-case letters, "
            "digits, `-`, `_` or `.`"
        )
        raise usage_error(f"`{text}` is an invalid URL", why, hint)
    path = (match[3] or "").strip("/")
    # An empty path is the bucket itself. For the store `..` is an ordinary name, but a file that is
    # copied from there would leave its folder.
    has_invalid_part = path != "" and not {"", ".", ".."}.isdisjoint(path.split("/"))
    if has_invalid_part or not path.isprintable():
        why = "its path has an empty part, or `.` or `..`"
        raise usage_error(f"`{text!a}` is an invalid URL", why, hint)
    return ObjectStoreUrl(match[1], match[2], path)
