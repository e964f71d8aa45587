"""The files of a checkpoint in a folder, and the settings for reading remote ones.

The files are on a disk, in a bucket or on the hub, with one interface: see `detect.Folder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath

from prepcli.core.observer import NullProgress, Observer, Progress
from prepcli.formats.orbax import (
    ITEM_MARKERS,
    find_item,
    item_metadata_file,
    list_checkpoint_folders,
)
from prepcli.formats.registry import Kind
from prepcli.planning.item_storage import METADATA_FILE
from prepcli.stores.byte_ranges import (
    DEFAULT_RETRY_POLICY,
    RetryPolicy,
    retry_policy_from_env,
)
from prepcli.stores.files import list_folder, read_bytes
from prepcli.stores.paths import AnyPath, StorePath, local_copy, path_in_folder


@dataclass(frozen=True, slots=True)
class Access:
    """Settings for reading remote checkpoints.

    Attributes:
        offline: Use only local files and the hub's cache.
        stream: Read tensors of a hub model remotely instead of downloading it.
        allow_urls: Accept object store URLs. Their tensors are read remotely.
        allow_adapters: Accept adapters of PEFT. They are not complete models.
        allow_quantized: Accept models with quantised weights.
        allow_gguf: Accept GGUF files.
        progress: Receives the progress of a download.
        warn: Called with a warning if the hub is unreachable and a cached model is used.
        note: Called with a note if settings or tensors of the model are ignored.
        retry_policy: Time-out and retries of each request.
        copied_files: Name patterns of further side files to fetch.
        strict: Refuse tensors that the index does not name.
    """

    offline: bool = False
    stream: bool = False
    allow_urls: bool = False
    allow_adapters: bool = False
    allow_quantized: bool = False
    allow_gguf: bool = False
    progress: Progress = field(default_factory=NullProgress)
    warn: Callable[[str], object] = str
    note: Callable[[str], object] = str
    retry_policy: RetryPolicy = DEFAULT_RETRY_POLICY
    copied_files: tuple[str, ...] = ()
    strict: bool = False


DEFAULT_ACCESS = Access()


def make_access(
    observer: Observer, *, offline: bool, stream: bool = False, allow_urls: bool = False
) -> Access:
    """Return the access to remote checkpoints, with the time-outs that the environment sets."""
    policy = retry_policy_from_env(os.environ, observer.note)
    return Access(
        offline,
        stream,
        allow_urls,
        progress=observer.progress(),
        warn=observer.warn,
        note=observer.note,
        retry_policy=policy,
    )


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class OpenFolder:
    """A folder or a single file of a checkpoint, on a disk or in a bucket. Its names are listed once.

    Attributes:
        display_name: Name of the checkpoint in messages.
        path: Folder or file.
        commit: Commit on the hub, if it is a model of the hub.
        omitted: Descriptions of files and subfolders on the hub that are not in `path`, e.g. `onnx/ (weights)`.
    """

    display_name: str
    path: AnyPath
    commit: str | None = None
    omitted: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """Whether the files are read from a server."""
        return isinstance(self.path, StorePath)

    @cached_property
    def listed_names(self) -> Sequence[str]:
        """Names of all files and subfolders."""
        return list_folder(self.path)

    @cached_property
    def item(self) -> AnyPath | None:
        """The Orbax item that the folder is or holds."""
        return find_item(self.path, self.listed_names)

    def names(self) -> list[str]:
        """List the names in the folder, and the metadata file of its Orbax item."""
        names = [name for name in self.listed_names if name != METADATA_FILE]
        # Only the item that will be opened is listed, e.g. the one of a run's last step.
        if self.item is None:
            return names
        folder = path_in_folder(self.item, self.path) or PurePath()
        metadata_files = ITEM_MARKERS[item_metadata_file(self.item) or METADATA_FILE]
        return [*((folder / name).as_posix() for name in metadata_files), *names]

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a small file, or fewer if the file is shorter."""
        # The local copy of a file in a store: the opener reads it again.
        return read_bytes(local_copy(self.path / name), start, stop - start)

    def checkpoint_folders(self) -> list[AnyPath]:
        """List the subfolders with checkpoints of their own."""
        return list_checkpoint_folders(self.path)

    def open_headers(self) -> AnyPath:
        """Return the folder itself."""
        return self.path

    def fetch(self, kind: Kind) -> OpenFolder:
        """Return the folder itself: its files are read where they are."""
        return self
