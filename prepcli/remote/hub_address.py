"""Addresses of repositories on the hub, as a browser or huggingface_hub shows them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote

RepoType = Literal["model", "dataset", "space"]

_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
_TYPES: dict[str | None, RepoType] = {None: "model", "datasets": "dataset", "spaces": "space"}
_KIND = r"(?:(?P<kind>datasets|spaces)/)?"
_OWNER = r"[A-Za-z0-9][\w.-]*"
# A revision has no slash, except for the branches `refs/convert/NAME` that the hub makes.
_FILE_SYSTEM = re.compile(
    rf"{_KIND}(?P<id>{_OWNER}/[\w.-]+?)(?:@(?P<revision>[^/@]+(?:/convert/[^/]+)?))?(?:/(?P<path>.+))?",
    re.ASCII,
)
# Models of the hub's first years have no owner, e.g. `gpt2`. A page quotes the slashes of a revision.
_PAGE = re.compile(
    rf"{_KIND}(?P<id>{_OWNER}(?:/[\w.-]+)?)"
    r"(?:/(?:tree|blob|resolve|raw|commit)/(?P<revision>[^/]+)(?:/(?P<path>.+))?"
    r"|/(?:viewer|discussions|commits)(?:/.*)?)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class HubAddress:
    """A repository on the hub, and a file or folder in it.

    Attributes:
        repo_type: Kind of repository.
        hub_id: `OWNER/NAME`, or `NAME` of an old model.
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
    HF_ENDPOINT.

    >>> parse_hub_address("https://huggingface.co/datasets/owner/name")
    HubAddress(repo_type='dataset', hub_id='owner/name', revision=None, path='')

    Returns:
        The parts of the address. None for any other text.
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
            match = _PAGE.fullmatch(path.partition("?")[0].strip("/"))
    if match is None:
        return None
    revision = match["revision"]
    return HubAddress(
        repo_type=_TYPES[match["kind"]],
        hub_id=match["id"],
        revision=unquote(revision) if revision else None,
        path=unquote(match["path"] or ""),
    )
