"""Addresses of checkpoints: objects (`gs://`, `s3://`), and repositories on the hub as a browser shows them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from prepcli.core.errors import usage_error

RepoType = Literal["model", "dataset", "space", "page"]

_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_TYPES: dict[str | None, RepoType] = {None: "model", "datasets": "dataset", "spaces": "space"}
_KIND = r"(?:(?P<kind>datasets|spaces)/)?"
_OWNER = r"[A-Za-z0-9][\w.-]*"
# A revision has no slash, except for the branches that the hub makes: of conversions and of pull requests.
_HUB_BRANCH = r"refs/convert/[^/]+|refs/pr/\d+"
_FILE_SYSTEM = re.compile(
    rf"{_KIND}(?P<id>{_OWNER}/[\w.-]+?)(?:@(?P<revision>{_HUB_BRANCH}|[^/@]+))?(?:/(?P<path>.+))?",
    re.ASCII,
)
# Models of the hub's first years have no owner, e.g. `gpt2`. A page quotes the slashes of a revision.
_PAGE = re.compile(
    rf"{_KIND}(?P<id>{_OWNER}(?:/[\w.-]+)?)"
    rf"(?:/(?:tree|blob|resolve|raw|commit)/(?P<revision>{_HUB_BRANCH}|[^/]+)(?:/(?P<path>.+))?"
    r"|/(?:viewer|discussions|commits)(?:/.*)?)?",
    re.ASCII,
)
# First names of pages that belong to no repository, e.g. `papers/2302.13971`. No owner has such a name.
_SITE_PAGES = {
    *("api", "blog", "chat", "collections", "datasets", "docs", "enterprise", "join", "languages"),
    *("learn", "login", "metrics", "models", "new", "organizations", "papers", "posts", "pricing"),
    *("search", "settings", "spaces", "storage", "tasks"),
}
_URL = re.compile(r"(gs|s3)://([^/]+)(?:/(.*))?", re.DOTALL)
# A superset of the valid names. The store refuses the rest.
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository on the hub, and a file or folder in it, or another page of the hub.

    Attributes:
        repo_type: Kind of repository. "page" for a page that belongs to none.
        hub_id: `OWNER/NAME`, or `NAME` of an old model. Of a page, its whole path.
        revision: Branch, tag or commit, if the address has one.
        path: File or folder in the repository. Empty if the address has none.
    """

    repo_type: RepoType
    hub_id: str
    revision: str | None
    path: str


def parse_hub_address(text: str) -> HubAddress | None:
    """Parse `https://HOST/OWNER/NAME/tree/REVISION/PATH` or `hf://OWNER/NAME@REVISION/PATH`.

    Addresses of datasets and spaces have `datasets/` or `spaces/` before the owner. HOST is the hub's, or the one of
    HF_ENDPOINT. Its other pages, e.g. of a paper, have the type "page".

    >>> parse_hub_address("https://huggingface.co/datasets/owner/name")
    HubAddress(repo_type='dataset', hub_id='owner/name', revision=None, path='')
    """
    scheme, _, rest = text.rstrip("/").partition("://")
    match = None
    if scheme == "hf":
        match = _FILE_SYSTEM.fullmatch(rest)
    elif scheme in ("http", "https"):
        # The address may be malformed: the text is any word of the user.
        host, _, path = rest.partition("/")
        endpoint = os.environ.get("HF_ENDPOINT", "").rpartition("//")[2].rstrip("/")
        if host and host in {*_HOSTS, endpoint}:
            page = path.partition("?")[0].partition("#")[0].strip("/")
            match = _PAGE.fullmatch(page)
            is_site_page = match is not None and match["id"].partition("/")[0] in _SITE_PAGES
            if match is None or is_site_page:
                return HubAddress(repo_type="page", hub_id=page, revision=None, path="")
    if match is None:
        return None
    revision = match["revision"]
    return HubAddress(
        repo_type=_TYPES[match["kind"]],
        hub_id=match["id"],
        revision=unquote(revision) if revision else None,
        path=unquote(match["path"] or ""),
    )


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
    """Parse `gs://BUCKET/PATH` or `s3://BUCKET/PATH`."""
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


def parse_out_url(path: Path | None) -> ObjectStoreUrl | None:
    """Return the URL given as a path, such as `--out`, or None for a local path.

    `Path` collapses the `//` of a URL to `/`. This function restores it.

    Raises:
        UsageError: The scheme is not supported, or the bucket or path is invalid.
    """
    if path is None:
        return None
    posix = path.as_posix()
    if posix in ("gs:", "s3:"):  # without a bucket, e.g. of an unset variable, no slash is left
        posix += "/"
    scheme, colon, rest = posix.partition(":/")
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
