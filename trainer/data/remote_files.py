"""The interface to data files in buckets and on the hub, implemented by the trainer's caller."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prepcli.core.errors import usage_error
from trainer.data.files import DataFile

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a dataset to read.

    Attributes:
        config: Configuration of a dataset. None for its default.
        split: Split of a dataset. None selects the only split, or `train`.
        revision: Revision of a dataset on the hub. None for `main`.
        split_key: Name of the recipe key of the split, for errors.
    """

    config: str | None = None
    split: str | None = None
    revision: str | None = None
    split_key: str = field(default="split", compare=False)


WHOLE = Selection()
# Signs of a glob in the URL of an object store.
GLOB_SIGNS = re.compile(r"[*?]")


class RemoteFiles(Protocol):
    """Finder of data files by URL."""

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """List the data files of a URL, without reading them.

        Args:
            url: A file, a folder or a glob in an object store, or a dataset on the hub.
            accepts: Returns whether a file of a folder is data, by its name.
            selection: Part of a dataset on the hub.

        Raises:
            PrepError: There is no such file, or the store cannot be reached.
        """
        ...


class NoRemoteFiles:
    """RemoteFiles of a caller that reads only local files."""

    def find(
        self, url: str, accepts: Callable[[str], bool], selection: Selection
    ) -> Sequence[DataFile]:
        """Raise UsageError: there are no remote files."""
        raise usage_error(f"cannot read {url}", "only local files are read here", "pass a path")


def is_url(path: str) -> bool:
    """Return whether a path is a URL."""
    return URL.match(path) is not None
